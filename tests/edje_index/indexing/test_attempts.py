"""What the file of an attempt says about the inputs of a shard, after the process or the whole machine died."""

from __future__ import annotations

import contextlib

import pytest

from edje_index.indexing.attempts import DEATHS, begin_attempt, forget_attempt, forget_attempts
from storage_formats.format.layout import Layout

SHARD, POSITION = 3, 5


class PowerFailureError(BaseException):
    """Ends an attempt; the test then puts its file back, as if the process had been killed."""


def die(layout: Layout, position: int = POSITION) -> None:
    """Leave the file of an attempt that was killed while it prepared the input at `position`."""
    path = layout.attempt(SHARD)
    content = b""
    with contextlib.suppress(PowerFailureError), begin_attempt(layout, SHARD) as attempt, attempt.preparing(position):
        content = path.read_bytes()
        raise PowerFailureError
    path.write_bytes(content)


def deaths(layout: Layout) -> int:
    with begin_attempt(layout, SHARD) as attempt:
        return attempt.deaths[POSITION]


@pytest.mark.parametrize("forget", [forget_attempt, lambda layout, shard: forget_attempts(layout)])
def test_lost_machines_count_against_no_input(tmp_path, forget):
    layout = Layout(tmp_path)
    for _ in range(DEATHS + 2):
        die(layout)
        forget(layout, SHARD)
    assert not layout.attempt(SHARD).exists()  # no process has died: the next attempt need not be careful
    die(layout)
    for _ in range(DEATHS + 2):
        die(layout)
        forget(layout, SHARD)
    with begin_attempt(layout, SHARD) as attempt:
        assert attempt.careful
        assert not attempt.ended_workers(POSITION)


def test_deaths_before_a_lost_machine_still_count(tmp_path):
    layout = Layout(tmp_path)
    for _ in range(DEATHS):
        die(layout)
    die(layout, POSITION + 1)
    forget_attempt(layout, SHARD)
    assert deaths(layout) == DEATHS - 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"careful": true}', b'{"position": 5, "deaths": {}}', b"[" * 10**5])
def test_a_damaged_file_of_a_lost_machine_is_no_error(tmp_path, content):
    layout = Layout(tmp_path)
    layout.attempt(SHARD).parent.mkdir(parents=True)
    layout.attempt(SHARD).write_bytes(content)
    (layout.attempt(SHARD).parent / "notes.json").write_text("{}")
    forget_attempts(layout)
    forget_attempts(Layout(tmp_path / "no index"))


def test_an_attempt_that_has_ended_is_not_begun_again(tmp_path):
    layout = Layout(tmp_path)
    forget_attempt(layout, SHARD)
    assert not layout.attempt(SHARD).exists()
