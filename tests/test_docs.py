"""The documentation names commands, options and files that exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

import edje_index
from pipelines.cli.main import cli
from tests.conftest import REPO

GUIDES = [
    REPO / "README.md",
    REPO / "CONTRIBUTING.md",
    REPO / "SECURITY.md",
    *sorted((REPO / "docs").glob("*.md")),
]
PAGES = [*GUIDES, *sorted((REPO / "docs/lab").glob("*.md"))]


def command_lines(text):
    """Every `edje-index ...` in indented code blocks and inline code, with
    continued lines joined.
    """
    text = text.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    inline = re.findall(r"`([^`]+)`", text)
    return [line for line in (*lines, *inline) if line.startswith("edje-index ")]


def check_command(line):
    """Raise click.UsageError if a command or an option of `line` does not exist.
    Nothing is run.
    """
    arguments = shlex.split(line, comments=True)[1:]
    command: click.Command = cli
    context = click.Context(command, info_name="edje-index")
    while (
        isinstance(command, click.Group)
        and arguments
        and not arguments[0].startswith("-")
    ):
        name = arguments.pop(0)
        # a placeholder
        if name.isupper():
            return
        subcommand = command.get_command(context, name)
        if subcommand is None:
            raise click.UsageError(f"no command '{name}'", context)
        command = subcommand
        context = click.Context(subcommand, context, info_name=name)
    values, extra, _ = command.make_parser(context).parse_args(arguments)
    if extra:
        raise click.UsageError(f"unexpected arguments {extra}", context)
    for parameter in command.params:
        if isinstance(parameter.type, click.Choice) and parameter.name in values:
            given = values[parameter.name]
            for value in given if isinstance(given, list | tuple) else [given]:
                parameter.type.convert(value, parameter, context)


EXAMPLES = [(page, line) for page in GUIDES for line in command_lines(page.read_text())]


@pytest.mark.parametrize(
    ("page", "line"),
    EXAMPLES,
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_every_command_line_has_existing_options(page, line):
    check_command(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            anchors = {
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                for heading in headings
            }
            assert anchor in anchors, f"{page.name} links to #{anchor} of {target}"


def test_every_page_has_a_place_in_the_site():
    navigation = (REPO / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for page in (REPO / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation, (
            f"add {page.name} to `nav` in mkdocs.yml"
        )


def test_the_citation_has_the_version_of_the_package():
    text = (REPO / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", text, re.MULTILINE) == [
        edje_index.__version__
    ]
