"""Default values of options from a TOML file."""

from __future__ import annotations

import json
import shutil

import click
import pytest

from pipelines.cli.defaults import use_defaults
from pipelines.cli.main import cli
from storage_formats.errors import UsageError
from tests.conftest import REPO

GOLDEN = REPO / "tests" / "golden" / "release_0_1" / "index"


@pytest.fixture
def defaults(tmp_path):
    """Writes a file with defaults and returns its path."""

    def write(text):
        path = tmp_path / "edje.toml"
        path.write_text(text)
        return path

    return write


def values_of(path, *arguments):
    """The values that a command gets: from `path` and from the command line."""
    with cli.make_context("edje-index", ["--defaults", str(path), *arguments]) as context:
        name, command, rest = cli.resolve_command(context, [*context._protected_args, *context.args])
        with command.make_context(name, rest, parent=context) as inner:
            return inner.params


def test_a_file_sets_defaults_and_the_command_line_wins(defaults):
    path = defaults(
        '[build]\nout = "x.edje"\nworkers = 3\nshard-size = 7\nprecision = ["fp8", "bf16"]\ndedupe = true\n'
    )
    values = values_of(path, "build", "photos", "--workers", "5")
    assert (str(values["out"]), values["workers"], values["shard_size"]) == ("x.edje", 5, 7)
    assert (tuple(values["precisions"]), values["dedupe"]) == (("fp8", "bf16"), True)
    assert values["truncated"] == "fail"
    assert tuple(values_of(path, "build", "photos", "--precision", "int8")["precisions"]) == ("int8",)


def test_a_size_is_a_number_of_bytes_or_has_a_unit(defaults):
    assert values_of(defaults('[append]\nmemory = "1.5 GB"\n'), "append", "index", "photos")["memory"] == 1_500_000_000
    path = defaults("[append]\nmemory = 800000000\n")
    assert values_of(path, "append", "index", "photos")["memory"] == 800_000_000
    assert values_of(path, "append", "index", "photos", "--memory", "2Gi")["memory"] == 2 << 30
    with pytest.raises(UsageError, match=r"edje.toml: \[append\] memory: 'lots' is not a size"):
        values_of(defaults('[append]\nmemory = "lots"\n'), "append", "index", "photos")


def test_a_table_holds_for_its_command_only(defaults):
    path = defaults("[build]\nworkers = 3\n[append]\nworkers = 4\n")
    assert values_of(path, "append", "index", "photos")["workers"] == 4
    assert values_of(path, "update", "index")["workers"] is None


def test_commands_of_a_group_have_tables_of_their_own(defaults, run, tmp_path):
    index = shutil.copytree(GOLDEN, tmp_path / "index")
    code, out, err = run("--defaults", defaults("[ann.build]\njson = true\nquiet = true\n"), "ann", "build", index)
    assert (code, err) == (0, "")
    assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[biuld]\n", "there is no command biuld"),
        ("workers = 3\n", "there is no command workers"),
        ("build = 3\n", "build is not a table"),
        ("[build]\nworker = 3\n", "[build] worker is not an option"),
        ("[build]\nworkers = 0\n", "[build] workers: 0 is not in the range"),
        ('[build]\nworkers = "many"\n', "[build] workers: 'many' is not a valid integer"),
        ("[build]\nworkers = true\n", "[build] workers: True is not a text or number"),
        ("[build]\nout = 5\n", "[build] out: 5 is not a path; put the path in quotation marks"),
        ("[build]\nworkers = 2.7\n", "[build] workers: 2.7 is not a whole number"),
        ("[build]\nworkers = inf\n", "[build] workers: inf is not a whole number"),
        ("[build]\nworkers = [2]\n", "[build] workers: [2] is a list"),
        ('[build]\nprecision = "fp8"\n', "[build] precision: 'fp8' is not a list"),
        ("[build]\nprecision = [[]]\n", "[build] precision: [] is not a text"),
        ('[build]\ndedupe = "yes"\n', "[build] dedupe: 'yes' is not true or false"),
        ('[build]\nengine = "spark"\n', "[build] engine: 'spark' is not one of"),
        ("[model.init]\nnothing = 1\n", "[model] [init] nothing is not an option"),
        ("[build\n", "is not a TOML file"),
    ],
)
def test_what_a_file_must_not_hold_is_said_with_its_name(defaults, run, text, words):
    path = defaults(text)
    code, out, err = run("--defaults", path, "info", GOLDEN)
    assert (code, out) == (2, "")
    assert words in err
    assert str(path) in err


def test_a_file_that_is_absent_or_not_utf_8_is_wrong_usage(run, tmp_path):
    for path in (tmp_path / "absent.toml", tmp_path / "bytes.toml"):
        (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
        code, _, err = run("--defaults", path, "info", GOLDEN)
        assert code == 2
        assert str(path) in err


def test_every_option_has_a_name_of_its_own_in_a_file():
    def walk(command, context):
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                walk(command.get_command(context, name), context)
            return
        names = [max(option.opts, key=len) for option in command.params if isinstance(option, click.Option)]
        assert len(names) == len(set(names)), command.name

    walk(cli, click.Context(cli))
    assert use_defaults
