"""Sizes in messages and in options."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize, TypeAdapter

from pipelines.progress.wording import parse_bytes

UNITS = ["", "B", "K", "kB", "m", "MB", "G", "GB", "t", "TB", "KiB", "MiB", "GiB", "TiB"]


@given(st.integers(0, 10**6), st.integers(0, 9), st.sampled_from(["", " "]), st.sampled_from(UNITS))
def test_a_size_is_parsed_as_pydantic_does(whole, tenths, space, unit):
    text = f"{whole}.{tenths}{space}{unit}"
    expected = TypeAdapter(ByteSize).validate_python(text)
    assert parse_bytes(text) == pytest.approx(expected, rel=1e-15, abs=1)  # pydantic rounds to a float


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "8,5G", "1e9", "8X", "8GG", "8iB", "8 G x", "\u0663G", "8G\n", "inf", "nan"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="is not a size; give a number of bytes with a unit"):
        parse_bytes(text)


def test_a_size_that_is_none_is_wrong_usage(run, tmp_path):
    code, _, err = run("build", tmp_path, "--out", tmp_path / "x", "--model", "m", "--memory", "lots")
    assert code == 2
    assert "--memory" in err
    assert "'lots' is not a size" in err
