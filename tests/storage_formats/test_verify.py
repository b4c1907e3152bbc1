from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_formats import UsageError, verify_index
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.rows import RowEntry
from tests.conftest import write_random_index

SPEC = IndexSpec(rows=21, shard_size=8, block_shape=(4, 16), embed_dim=6)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    write_random_index(root, SPEC, failed=frozenset({3}), duplicates=frozenset({8}))
    return root


@pytest.fixture
def copy(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "index")
    return tmp_path / "index"


def codes(root) -> set[tuple[str, str]]:
    return {(problem.path, problem.code) for problem in verify_index(root)}


def test_sound_index_has_no_problems(sound):
    steps = []
    assert verify_index(sound, lambda done, of: steps.append((done, of))) == []
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_verifying_no_index_is_an_error(tmp_path):
    with pytest.raises(UsageError):
        verify_index(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.data())
def test_any_changed_byte_is_found(sound, data):
    files = sorted(path for path in sound.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    original = path.read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    changed = bytearray(original)
    changed[place] ^= 0xFF
    path.write_bytes(changed)
    try:
        assert verify_index(sound), f"byte {place} of {path.relative_to(sound)} was changed unseen"
    finally:
        path.write_bytes(original)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.data())
def test_any_lost_or_shortened_file_is_found(sound, data):
    files = sorted(path for path in sound.rglob("*") if path.is_file() and path.name != "index.json")
    path = data.draw(st.sampled_from(files))
    original = path.read_bytes()
    keep = data.draw(st.integers(-1, len(original.rstrip()) - 1))  # JSON is complete without its last line break
    path.unlink()
    if keep >= 0:
        path.write_bytes(original[:keep])
    try:
        assert any(path.name in problem.path or path.name in problem.message for problem in verify_index(sound))
    finally:
        path.write_bytes(original)


def test_damaged_block_is_named_by_its_row(copy):
    path = Layout(copy).token_shard("bf16", 1)
    data = bytearray(path.read_bytes())
    data[2 * 128 + 5] ^= 1
    path.write_bytes(data)
    found = verify_index(copy)
    assert {problem.code for problem in found} == {"checksum", "block-checksum"}
    assert any(problem.message.endswith("row 10") for problem in found)


def test_files_that_no_commit_made_are_named(copy):
    (copy / "rows" / "extra.parquet").write_bytes(b"")
    (copy / "tokens" / "bf16" / "c.9.0.0").write_bytes(b"")
    assert codes(copy) == {("rows/extra.parquet", "stray-file"), ("tokens/bf16/c.9.0.0", "stray-file")}


def test_rows_that_contradict_the_data_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(RowEntry, "fail", lambda *_: None)  # row 3 stays "indexed" but gets no block
    write_random_index(tmp_path, SPEC, failed=frozenset({3}))
    assert {code for _, code in codes(tmp_path)} == {"shard-index", "embedding"}


def test_edited_manifest_is_found(copy):
    path = copy / "index.json"
    value = json.loads(path.read_text())
    value["counts"]["indexed"] += 1
    path.write_text(json.dumps(value))
    assert codes(copy) == {("index.json", "manifest")}


def test_an_index_that_changes_during_verification_is_not_called_damaged(copy):
    def change(done, of):
        if done == of:
            (copy / "tokens" / "bf16" / "extra").write_text("of another precision, say")
            manifest = copy / "index.json"
            manifest.write_text(manifest.read_text() + "\n")

    problems = verify_index(copy, change)
    assert [problem.code for problem in problems] == ["changed"]
    assert "verify the index again" in problems[0].message
    assert codes(copy) == {("tokens/bf16/extra", "stray-file")}
