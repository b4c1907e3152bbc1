"""`edje-index help`: the guides on the terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pipelines.cli import help as help_command
from tests.command_line import command, environment
from tests.conftest import REPO

TOPICS = Path(help_command.__file__).with_name("topics")


def test_every_guide_of_the_site_is_a_topic(run):
    navigation = yaml.safe_load((REPO / "mkdocs.yml").read_text())["nav"]
    pages = {name: page for entry in navigation for name, page in entry.items()}
    guides = [page for entry in pages["How-to guides"] for page in entry.values()]
    code, out, _ = run("help")
    assert code == 0
    for page in [pages["Tutorial"], *guides]:
        title = (REPO / "docs" / page).read_text().splitlines()[0].removeprefix("# ")
        assert re.search(rf"^  {page.removesuffix('.md')} +{re.escape(title)}$", out, re.MULTILINE), page


@pytest.mark.parametrize("topic", help_command.topics())
def test_a_topic_is_the_page_itself(run, topic):
    page = (TOPICS / f"{topic}.md").resolve()
    assert page in (REPO / "docs" / f"{topic}.md", REPO / "storage_formats/SPEC.md")
    code, out, err = run("help", topic)
    assert (code, err) == (0, "")
    lines = [line for line in page.read_text().splitlines() if "[" not in line and "](" not in line]
    assert set(lines) <= set(out.splitlines())
    assert not re.search(r"\]\((?!https?://)", out)


def test_links_name_topics(run):
    _, out, _ = run("help", "serve")
    assert "faster (cascade (`edje-index help search`))" in " ".join(out.split())
    assert out.endswith("\nOptions: `edje-index serve --help`\n")
    assert "![" not in run("help", "architecture")[1]


def test_a_command_without_a_guide_shows_its_options(run):
    assert run("help", "verify") == run("verify", "--help")


def test_an_unknown_topic(run):
    code, out, err = run("help", "sailing")
    assert (code, out) == (2, "")
    assert err == "error: there is no topic 'sailing'; 'edje-index help' lists the topics\n"


def test_topics_and_commands_are_completed():
    variables = {"_EDJE_INDEX_COMPLETE": "bash_complete", "COMP_WORDS": "edje-index help v", "COMP_CWORD": "2"}
    done = subprocess.run(command(), env={**environment(), **variables}, capture_output=True, text=True, check=True)
    assert re.findall(r"^plain,(.*)$", done.stdout, re.MULTILINE) == ["verify", "versions", "video"]


def read_until(terminal: int, end: bytes) -> bytes:
    """Read from a terminal until `end` arrives or the other end is closed."""
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while end not in shown and (part := os.read(terminal, 65536)):
            shown += part
    return shown


def on_a_terminal(topic: str, keys: bytes, **variables: str) -> str:
    """What a terminal shows of a guide. `keys` are typed when the first page is there."""
    terminal, other_end = pty.openpty()
    chosen = {name: value for name, value in environment().items() if name not in ("PAGER", "LESS", "NO_COLOR")}
    with subprocess.Popen(
        command("help", topic),
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        env={**chosen, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **variables},
        start_new_session=True,
    ) as process:
        os.close(other_end)
        shown = read_until(terminal, b"\x1b[K" if keys else b"no such text")  # `less` clears the line of its prompt
        os.write(terminal, keys)
        shown += read_until(terminal, b"no such text")
    os.close(terminal)
    assert process.returncode == 0
    return shown.decode(errors="replace")


@pytest.mark.slow
def test_a_terminal_gets_a_formatted_page():
    text = on_a_terminal("quantize", b"", PAGER="cat")
    assert "\x1b" not in text
    assert "| precision |" not in text
    assert "Quantize tokens" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("less") is None, reason="less is not installed")
@pytest.mark.parametrize("less", ["", "-S"])
def test_less_shows_styles_and_no_control_characters(less):
    text = on_a_terminal("quantize", b"q", **({"LESS": less} if less else {}))
    assert "ESC" not in text  # the name that `less` shows for the character
    assert "Quantize tokens" in text
    assert ("\x1b[1m" in text) == (not less)  # a user who chose options of `less` without -R gets no styles
