"""MkDocs hook: generates pages: commands and Python interface from the code, and
the notebooks.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

import edje_index
import storage_formats
from pipelines.cli.main import SECTIONS, cli

# what click prints on a terminal of 80 columns, which fits beside the navigation
HELP_WIDTH = 78
PACKAGES = ["storage_formats", "edje_index"]
NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


def commands(
    group: click.Group, context: click.Context, names: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield each command below `group`, such as "edje-index model get", with its
    help text.
    """
    for name in names:
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(
            command,
            context,
            info_name=name,
            terminal_width=HELP_WIDTH,
            **command.context_settings,
        )
        yield inner.command_path, command.get_help(inner)
        if isinstance(command, click.Group):
            yield from commands(command, inner, command.list_commands(inner))


def section_page(heading: str) -> str:
    """Markdown page with the help text of every command of a section of `edje-index
    --help`.
    """
    context = click.Context(
        cli, info_name="edje-index", terminal_width=HELP_WIDTH, **cli.context_settings
    )
    described = list(commands(cli, context, list(SECTIONS[heading])))
    # The table of contents would take the room of the help texts.
    parts = ["---\nhide: [toc]\n---", f"# {heading}: commands\n"]
    links = [f"[{path}](#{path.replace(' ', '-')})" for path, _ in described]
    parts.append(" · ".join(links) + "\n")
    parts += [f"## {path}\n\n~~~text\n{text}\n~~~\n" for path, text in described]
    return "\n".join(parts)


def package_page(package: str) -> str:
    """Markdown page with a directive of mkdocstrings for each public name of a
    package.
    """
    module = importlib.import_module(package)
    parts = [f"# {package}\n", inspect.getdoc(module) or "", ""]
    homes: dict[str, str] = storage_formats._MODULES | edje_index._MODULES
    for name in sorted(homes.keys() & set(module.__all__), key=str.lower):
        home = homes[name]
        owner = home.partition(".")[0]
        known = storage_formats.__all__ if owner == "storage_formats" else []
        if package != owner and name in known:
            parts.append(f"## {name}\n\nSee [{owner}.{name}][{home}.{name}].\n")
        else:
            parts.append(f"::: {home}.{name}\n")
    return "\n".join(parts)


def section_path(heading: str) -> str:
    """Path of the page of a section, for example "reference/cli/build.md"."""
    return f"reference/cli/{heading.lower()}.md"


def output_text(output: dict[str, Any]) -> str:
    """Markdown of an output of a cell: a picture, a table in HTML, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![Figure](data:image/png;base64,{data['image/png'].strip()})"
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"~~~text\n{text.rstrip()}\n~~~" if text else ""


def notebook_page(path: Path) -> str:
    """Markdown page with the cells of a notebook and their outputs, and a link to the
    notebook.
    """
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"~~~python\n{text}\n~~~")
        parts += filter(None, map(output_text, cell["outputs"]))
    parts.insert(1, f"[Download the notebook]({path.name})")
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """Generated pages by path."""
    generated = {section_path(heading): section_page(heading) for heading in SECTIONS}
    generated |= {
        f"reference/{package}.md": package_page(package) for package in PACKAGES
    }
    return generated | {
        f"notebooks/{path.stem}.md": notebook_page(path) for path in NOTEBOOKS
    }


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the generated pages to the site."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
