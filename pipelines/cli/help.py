"""The command `edje-index help`: reads the guides of the documentation on the terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from storage_formats.errors import UsageError

_TOPICS = Path(__file__).with_name("topics")  # links to the pages in docs/, so that there is one text
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_PICTURE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n+", re.MULTILINE)
_WIDEST = 100


def topics() -> dict[str, str]:
    """Return the title of each guide by the name of its topic."""
    return {path.stem: _title(path) for path in sorted(_TOPICS.glob("*.md"))}


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next(lines).lstrip("# ").rstrip()


def _complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    names = [*topics(), *_commands(ctx)]
    return sorted({name for name in names if name.startswith(incomplete)})


def _commands(ctx: click.Context) -> list[str]:
    """Return the names of the commands of `edje-index`."""
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    return root.command.list_commands(root)


@click.command("help")
@click.argument("topic", required=False, shell_complete=_complete)
@click.pass_context
def show_help(ctx: click.Context, topic: str | None) -> None:
    """Show the guide on TOPIC, or list all topics.

    The guides are the pages of the documentation. On a terminal, the guide is formatted and opened in a pager. TOPIC
    may also be the name of a command that has no guide. Then the options of that command are shown.

    \b
    Examples:
      edje-index help
      edje-index help quantize
      edje-index help format > format.md
    """
    if topic is None:
        _list_topics()
    elif topic in topics():
        _show(_text(topic, is_command=topic in _commands(ctx)))
    elif topic in _commands(ctx):
        _show_options(ctx, topic)
    else:
        raise UsageError(f"there is no topic '{topic}'; 'edje-index help' lists the topics")


def _list_topics() -> None:
    titles = topics()
    column = max(map(len, titles))
    click.echo("Topics:")
    for topic, title in titles.items():
        click.echo(f"  {topic.ljust(column)}  {title}")
    click.echo("\n'edje-index help TOPIC' shows a guide; 'edje-index COMMAND --help' shows the options of a command.")


def _show_options(ctx: click.Context, name: str) -> None:
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    command = root.command.get_command(root, name)
    assert command is not None
    click.echo(command.get_help(click.Context(command, root, info_name=name)))


def _text(topic: str, *, is_command: bool) -> str:
    """Return a guide in Markdown, without pictures. Links to other guides name their topics."""
    text = (_TOPICS / f"{topic}.md").read_text(encoding="utf-8")
    text = _LINK.sub(_link_text, _PICTURE.sub("", text))
    return f"{text.rstrip()}\n\nOptions: `edje-index {topic} --help`\n" if is_command else text


def _link_text(match: re.Match[str]) -> str:
    text, target = match[1], match[2]
    if "://" in target:
        return match[0]
    page = target.partition("#")[0].removesuffix(".md").rpartition("/")[2]
    topic = {"SPEC": "format"}.get(page, page)
    return f"{text} (`edje-index help {topic}`)" if topic in topics() else text


def _show(text: str) -> None:
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(width=min(_WIDEST, Console().width))
    with console.capture() as page:
        console.print(Markdown(text, hyperlinks=False))
    click.echo_via_pager(page.get())  # asks `less` for colours, and removes them for pagers that may not show them
