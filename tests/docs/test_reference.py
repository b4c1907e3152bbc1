"""The generated reference: help texts of all commands."""

import re

import pytest

from pipelines.cli.main import SECTIONS

COMMAND = re.compile(
    r"^## (edje-index [^\n]+)\n\n~~~text\n(.*?)\n~~~$", re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def reference():
    return pytest.importorskip("reference")


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_pages_hold_what_help_prints(reference, heading, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    documented = COMMAND.findall(reference.section_page(heading))
    assert len(documented) >= len(SECTIONS[heading])
    for command, text in documented:
        assert run.ok(*command.split()[1:], "--help").rstrip("\n") == text.rstrip("\n")


def test_every_listed_command_has_a_place(reference, run):
    _, listed, _ = run("--help")
    names = set(re.findall(r"^  ([a-z][a-z-]*)  ", listed, re.MULTILINE))
    documented = {
        command.split()[1]
        for heading in SECTIONS
        for command, _ in COMMAND.findall(reference.section_page(heading))
    }
    assert names == documented
