"""The generated reference: help texts of all commands, all public names, and error messages that really occur."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pipelines.cli.main import SECTIONS
from storage_formats import EdjeError, TokenStore, codec
from tests.conftest import REPO

INDEX = REPO / "tests" / "golden" / "release_0_1" / "index"
COMMAND = re.compile(r"^## (edje-index [^\n]+)\n\n~~~text\n(.*?)\n~~~$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def reference():
    return pytest.importorskip("reference")


@pytest.fixture(scope="module")
def messages():
    return pytest.importorskip("error_messages")


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_pages_hold_what_help_prints(reference, heading, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    documented = COMMAND.findall(reference.section_page(heading))
    assert len(documented) >= len(SECTIONS[heading])
    for command, text in documented:
        code, out, _ = run(*command.split()[1:], "--help")
        assert (code, out.rstrip("\n")) == (0, text.rstrip("\n")), command


def test_every_listed_command_has_a_place(reference, run):
    _, listed, _ = run("--help")
    names = set(re.findall(r"^  ([a-z][a-z-]*)  ", listed, re.MULTILINE))
    documented = {
        command.split()[1] for heading in SECTIONS for command, _ in COMMAND.findall(reference.section_page(heading))
    }
    assert names == documented


def test_subcommands_are_documented_too(reference):
    assert "edje-index model import" in dict(COMMAND.findall(reference.section_page("Models")))
    assert "edje-index bench fetch" in dict(COMMAND.findall(reference.section_page("Benchmarks")))


def matching(templates: set[str], message: str) -> list[str]:
    patterns = {text: re.sub(r"<[A-Z_0-9]+>", ".*", re.escape(text).replace(r"\<", "<")) for text in templates}
    return [text for text, pattern in patterns.items() if re.fullmatch(pattern, message, re.DOTALL)]


def calls(folder: Path) -> list:
    return [
        lambda: TokenStore.open(folder / "nowhere.edje"),
        lambda: codec("fp7"),
        lambda: TokenStore.open(INDEX, "bf16").fetch([10_000]),
        lambda: TokenStore.open(INDEX, "mxfp4"),
        lambda: TokenStore.open(INDEX, snapshot=7),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_real_messages_are_on_the_page(messages, number, tmp_path):
    with pytest.raises(EdjeError) as caught:
        calls(tmp_path)[number]()
    name = type(caught.value).__name__
    templates = {message.template for message in messages.all_messages() if message.error == name}
    assert matching(templates, str(caught.value)), str(caught.value)
    page = messages.errors_page()
    assert f"## {name}\n" in page
    assert f"Exit code {caught.value.exit_code}." in page.partition(f"## {name}\n")[2].partition("\n## ")[0]


@pytest.mark.slow
def test_a_message_that_nobody_raises_matches_nothing(messages):
    templates = {message.template for message in messages.all_messages()}
    assert not matching(templates, "the moon is made of cheese")


def test_values_in_messages_become_names(messages):
    source = "raise EdjeError(f'{self.path} has {len(rows)} rows' + '; run verify')\nraise EdjeError(text)\n"
    assert list(messages.raised(ast.parse(source), frozenset({"EdjeError"}))) == [
        messages.Message("EdjeError", "<PATH> has <LEN> rows; run verify")
    ]


def test_messages_of_other_spellings_are_found(messages):
    source = "raise click.UsageError('give a file')\nraise ServiceError(422, f'no row {row}')\n"
    assert list(messages.raised(ast.parse(source), frozenset({"UsageError", "ServiceError"}))) == [
        messages.Message("UsageError", "give a file"),
        messages.Message("ServiceError", "no row <ROW>"),
    ]


def test_a_wrong_use_of_a_benchmark_is_on_the_page(messages, run):
    code, _, err = run("bench", "fetch", "s3://bucket/photos.edje", "--precision", "fp8", "--precision", "bf16")
    assert code == 2
    message = err.removeprefix("error: ").partition(" (see ")[0]
    assert message in {each.template for each in messages.all_messages() if each.error == "UsageError"}
