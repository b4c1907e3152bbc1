"""The command line: help, errors, exit codes, standard output and standard error."""

import importlib
import importlib.metadata
import json
import platform
import signal
import subprocess
from pathlib import Path

import click
import pytest

from pipelines.cli.main import _MODULE_OF
from tests.command_line import command, environment
from tests.conftest import REPO

JOB = """
import a_package_that_is_not_installed
def job(
    index: IndexLocation, names: Sequence[str] = (), *, out: Path, k: int = 3,
    mode: Literal["one", "two"] = "one", parts: Sequence[str] = (), full: bool = False,
    least: float | None = None, unused: int = 1, on_event: OnEvent = ignore,
):
    '''A job.

    Args:
        out: directory to write.
        k: number of hits.
        mode: mode of the job.
        parts: part of `names`; repeatable.
        full: True to use everything, with `parts`.
        least: smallest share, 0.5 for half. None selects the share of INDEX.
    '''
"""


COMMAND = """
from __future__ import annotations
from pipelines.cli.command import command
@command("declared_job:job", parts="--part", unused=None)
def made(job, *, html: Path = None):
    '''Do something.

    Args:
        html: page to write.
    '''
"""


def test_a_parameter_is_declared_once(tmp_path, monkeypatch):
    (tmp_path / "declared_job.py").write_text(JOB)
    (tmp_path / "declared_command.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("declared_command").made
    assert made.help == "Do something."
    context = click.Context(
        made, info_name="made", terminal_width=200, show_default=True
    )
    assert made.get_usage(context) == "Usage: made [OPTIONS] INDEX [NAMES]..."
    options = made.get_help(context).partition("Options:\n")[2]
    assert [line.split(maxsplit=2) for line in options.splitlines()[:-3]] == [
        ["--out", "PATH", "Directory to write.  [required]"],
        ["-k", "INTEGER", "Number of hits.  [default: 3]"],
        ["--mode", "[one|two]", "Mode of the job.  [default: one]"],
        ["--part", "TEXT", "Part of NAMES; repeatable."],
        ["--full", "Use", "everything, with --part."],
        [
            "--least",
            "FLOAT",
            "Smallest share, 0.5 for half.  [default: the share of INDEX]",
        ],
        ["--html", "PATH", "Page to write."],
    ]
    given = made.make_context("made", ["i", "a", "--out", "o", "--full", "-k", "5"])
    assert given.params["index"] == Path("i")
    assert (given.params["names"], given.params["full"]) == (("a",), True)
    assert (given.params["k"], given.params["least"]) == (5, None)
    given = made.make_context("made", ["i", "--out=-o", "--least", "-0.5"])
    assert (given.params["out"], given.params["least"]) == (Path("-o"), -0.5)
    with pytest.raises(click.NoSuchOption, match="--par"):
        made.make_context("made", ["i", "--out", "o", "--par", "x"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "--out", "index"], "SOURCE"),
        (
            ["build", "photos", "--model", "s3://b/n", "--out", "index"],
            "s3://b/n is a URL",
        ),
        (
            ["build", "photos", "--model", ".", "--out", "ftp://u:word@host/n"],
            "cannot be at ftp://...@host/n",
        ),
        (["info", "http://[::1/n"], "http://[::1/n: invalid IPv6"),
        (
            ["serve", "index", "--deadline", "nan"],
            "deadline must be",
        ),
        (["search", "index", "a", "--min-relevance", "NaN"], "must be a number"),
        (["--frobnicate"], "frobnicate"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    run, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    err = run.refused(*arguments)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_an_error_with_json_is_an_object_too(run, tmp_path):
    code, out, err = run("info", tmp_path / "nowhere", "--json")
    told = json.loads(out)
    assert (code, told["exit_code"]) == (2, 2)
    assert told["error"].startswith(f"there is no index at {tmp_path}/nowhere; check")
    assert err.startswith("error: there is no index")


def test_an_unexpected_error_is_one_line_and_says_how_to_see_more(run, monkeypatch):
    monkeypatch.setitem(_MODULE_OF, "info", __name__)
    code, out, err = run("info", "--help")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: unexpected LookupError: info; ")
    assert "EDJE_DEBUG=1" in err
    monkeypatch.setenv("EDJE_DEBUG", "1")
    assert "Traceback" in run("info", "--help")[2]


@pytest.mark.parametrize(
    "arguments", [["info", "--help"], ["verify", "INDEX", "--json"]]
)
def test_a_closed_pipe_ends_the_program_quietly(arguments):
    errors = b"error: there is no index at INDEX; " if "INDEX" in arguments else b""
    with subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        process.stdout.close()
        told = process.stderr.read()
        assert told.startswith(errors)
        assert told.count(b"\n") == bool(errors)
        assert process.wait() == 128 + signal.SIGPIPE


def test_names_in_messages_cannot_drive_the_terminal(run):
    _, _, err = run("info", "no\x1b[31mwhere")
    assert err.startswith("error: there is no index at no\\x1b[31mwhere; ")


def test_version_as_json_describes_the_environment(run):
    code, out, err = run("--version", "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert told["version"] == importlib.metadata.version("edje-index")
    assert told["python"] == platform.python_version()
    # one of the base installation, two of extras
    for name in ("numpy", "torch", "ray"):
        assert told["versions"][name] == importlib.metadata.version(name)
    assert run("--json", "--version") == (code, out, err)


def test_completion_offers_commands_and_options(run, monkeypatch):
    monkeypatch.setenv("_EDJE_INDEX_COMPLETE", "bash_complete")
    for words, position, expected in (
        ("edje-index qu", "1", "plain,quantize\n"),
        ("edje-index search --pre", "2", "plain,--precision\n"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", position)
        assert run.ok() == expected


def test_get_refuses_an_existing_folder_before_the_download(tmp_path, run):
    code, _, err = run("model", "get", "--out", tmp_path)
    assert (code, f"{tmp_path} exists already" in err) == (1, True)
    assert "downloading" not in err


def test_show_explains_a_bundle(run):
    bundle = REPO / "tests/golden/release_0_1/model"
    shown = run.ok("info", bundle)
    assert "None" not in shown
    record = run.json("info", bundle)
    assert record["block_shape"] == [4, 16]
    assert record["fingerprint"] != record["encoder_fingerprint"]
    assert "1.5 x" in record["score"]["t2i"]
    assert "2 x" in record["score"]["i2t"]
    assert all(
        record[name] in shown
        for name in ("fingerprint", "encoder_fingerprint", "notes")
    )
