"""Options and TOML of `train`: one way in for every setting, options win, the unknown is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.cli.train_options import read_request
from storage_formats.errors import UsageError

GIVEN = {"captions": (Path("a.jsonl"),), "out": Path("out"), "model": Path("model")}


def test_zero_is_a_value():
    options = {**GIVEN, "mlm_weight": 0.0, "dropout": 0.0, "seed": 0, "lr": None, "compile": False, "workers": None}
    request, config = read_request(options, None)
    assert (config.objective.mlm_weight, config.architecture.dropout) == (0.0, 0.0)
    assert config.lr == 3e-4
    assert (request.compile, request.workers) == (False, 1)
    assert request.run_folder == Path("out.run")


def test_options_win_over_the_file_and_its_paths_begin_at_its_folder(tmp_path):
    (tmp_path / "c.toml").write_text(
        'captions = "c.jsonl"\nmodel = "clip"\nout = "there"\nworkers = 2\n[loop]\nsteps = 5\n[optimizer]\nlr = 1\n'
    )
    request, config = read_request({"captions": (), "out": Path("here"), "model": None, "lr": 0.5}, tmp_path / "c.toml")
    assert request.captions == (tmp_path / "c.jsonl",)
    assert (request.model, request.out, request.workers) == (tmp_path / "clip", Path("here"), 2)
    assert (config.loop.steps, config.lr) == (5, 0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed = 3", "what is no setting: speed"),
        ("[loop]\nlr = 1", r"in \[loop\] what does not belong there: lr"),
        ("[loop", "cannot read"),
        ("steps = 'many'", "'steps' takes a value of type int"),
        ("workers = 0", "'workers' must be at least 1, got 0"),
        ("log_every = true", "'log_every' takes a whole number, got True"),
        ("compile = 'false'", "'compile' takes true or false"),
        ("dev = 5", "'dev' takes a path, got 5"),
        ("vision = 5", "'vision' takes a text"),
        ("device = 'steam'", "'device' is one of auto, cpu, cuda"),
        ("captions = 5", "'captions' takes paths of files, got 5"),
        ("captions = ['a', 5]", "'captions' takes paths of files"),
        ("text_length = 65", "--text-length is at most 64"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, words):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_request({**GIVEN, "captions": ()} if "captions" in text else GIVEN, tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"captions": ()}, "CAPTIONS"), ({"model": None}, "--vision"), ({"vision": "ViT-B-16:openai"}, "one of them")],
)
def test_what_is_missing_is_named(changes, words):
    with pytest.raises(UsageError, match=words):
        read_request({**GIVEN, **changes}, None)
