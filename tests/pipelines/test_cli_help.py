"""`edje-index help`: the guides on the terminal."""

from __future__ import annotations

import os
import pty
import re
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


@pytest.mark.slow
def test_a_terminal_gets_a_formatted_page():
    terminal, other_end = pty.openpty()
    variables = {**environment(), "PAGER": "cat", "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command("help", "quantize"), stdout=other_end, env=variables) as process:
        os.close(other_end)
        shown = b""
        try:
            while part := os.read(terminal, 65536):
                shown += part
        except OSError:  # the terminal is closed
            pass
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", shown.decode())
    assert "\x1b[" in shown.decode()
    assert "| precision |" not in text
    assert "Quantize tokens" in text
    assert max(map(len, text.splitlines())) <= 80
