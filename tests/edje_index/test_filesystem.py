"""JSON Lines files."""

from __future__ import annotations

import pytest

from edje_index.filesystem import JsonLine, read_json_lines


def test_json_lines_are_numbered_and_blank_lines_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n   \n[2]\n"three"')
    assert list(read_json_lines(path)) == [JsonLine(1, {"a": 1}), JsonLine(4, [2]), JsonLine(5, "three")]


@pytest.mark.parametrize(
    ("line", "words"),
    [(b"{", "not JSON"), (b'"\xff"', "not UTF-8"), (b"[" * 100_000, "not JSON"), (b"nul", "not JSON")],
)
def test_a_bad_line_says_why_and_ends_nothing(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n1\n")
    bad, good = read_json_lines(path)
    assert bad.value is None
    assert words in bad.error
    assert good == JsonLine(2, 1)


def test_bytes_that_are_not_utf8_can_be_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"\xff"\n')
    assert list(read_json_lines(path, decode_errors="surrogateescape")) == [JsonLine(1, "\udcff")]
