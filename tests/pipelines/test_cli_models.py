"""Commands about models: get and show."""

from __future__ import annotations

import json

from pipelines.cli import main
from tests.conftest import REPO


def test_get_refuses_an_existing_folder_before_the_download(tmp_path, capsys):
    assert main(["model", "get", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert f"{tmp_path} exists already" in told
    assert "downloading" not in told


def test_show_explains_a_bundle(capsys):
    bundle = REPO / "tests/golden/release_0_1/model"
    assert main(["model", "show", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "block shape          4 x 16\n" in shown
    assert main(["model", "show", str(bundle), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["block_shape"] == [4, 16]
    assert record["fingerprint"] != record["encoder_fingerprint"]
    assert "1.5 x" in record["score"]["t2i"]
    assert "2 x" in record["score"]["i2t"]
    assert all(record[name] in shown for name in ("fingerprint", "encoder_fingerprint", "notes"))


def test_show_refuses_another_directory(tmp_path, capsys):
    assert main(["model", "show", str(tmp_path)]) == 2
    assert "not a model bundle" in capsys.readouterr().err
