"""The command line: help, errors, exit codes, and what goes where."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest

from pipelines.cli.main import COMMANDS, cli


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_every_command_explains_itself_with_examples(run, name):
    code, out, err = run(name, "--help")
    assert (code, err) == (0, "")
    assert "Usage: edje-index " + name in out
    assert "Example" in out
    command = cli.get_command(None, name)
    assert command.help.splitlines()[0].endswith(".")
    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_the_group_lists_all_commands_in_order(run):
    _, out, _ = run("--help")
    listed = [line.split()[0] for line in out.partition("Commands:")[2].strip().splitlines()]
    assert listed == list(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "photos", "--out", "index"], "init-model"),
        (["build", "--out", "index"], "SOURCE"),
        (["build", "photos", "--out", "index", "--batch-size", "0"], "batch-size"),
        (["build", "photos", "--out", "index", "--engine", "spark"], "engine"),
        (["search", "index", "text", "-k", "20", "--pool", "10"], "--pool 10 is smaller"),
        (["info", "nowhere"], "no index at nowhere"),
        (["verify", "nowhere"], "no index at nowhere"),
        (["search", "nowhere", "text"], "no index at nowhere"),
        (["frobnicate"], "frobnicate"),
        (["--frobnicate"], "frobnicate"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_an_error_with_json_is_an_object_too(run, tmp_path):
    code, out, err = run("info", tmp_path / "nowhere", "--json")
    assert code == 2
    assert json.loads(out) == {"error": f"there is no index at {tmp_path}/nowhere", "exit_code": 2}
    assert err.startswith("error: there is no index")


def test_a_surprise_is_one_line_with_a_way_to_see_more(run, monkeypatch):
    monkeypatch.setitem(COMMANDS, "info", "tests.pipelines.test_cli:broken")
    code, out, err = run("info", "--help")
    assert (code, out) == (1, "")
    assert err == "error: unexpected AssertionError; run again with EDJE_DEBUG=1 to see where\n"
    monkeypatch.setenv("EDJE_DEBUG", "1")
    assert "Traceback" in run("info", "--help")[2]


broken = "not a command"


def test_a_reader_that_closes_its_pipe_causes_no_noise():
    done = subprocess.run(
        f"{sys.executable} -m pipelines.cli --help | head -c 1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("edje-index")
