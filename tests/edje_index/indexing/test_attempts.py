"""What the file of an attempt says about the inputs of a shard, after the process
or the whole machine died.
"""

from __future__ import annotations

import contextlib

import pytest

from edje_index.indexing.shard_encoding import DEATHS, begin_attempt
from storage_formats.format.layout import Layout

SHARD = 3
POSITION = 5


class PowerFailureError(BaseException):
    """Ends an attempt; the test then puts its file back, as if the process had been
    killed.
    """


def die(
    layout: Layout,
    position: int = POSITION,
    machine: str = "",
    alive: tuple[str, ...] = (),
) -> None:
    """Leave the file of an attempt that was killed while it prepared the input at
    `position`.
    """
    path = layout.attempt(SHARD)
    content = b""
    with (
        contextlib.suppress(PowerFailureError),
        begin_attempt(layout, SHARD, machine, alive) as attempt,
        attempt.preparing(position),
    ):
        content = path.read_bytes()
        raise PowerFailureError
    path.write_bytes(content)


def test_lost_machines_count_against_no_input(tmp_path):
    layout = Layout(tmp_path)
    for number in range(DEATHS + 2):
        die(layout, machine=f"job/{number}", alive=("job/99",))
    with begin_attempt(layout, SHARD, "job/99", ("job/99",)) as attempt:
        # no process has died
        assert not attempt.careful
    for number in range(DEATHS + 2):
        # the first one died, and its machine goes on
        die(layout, machine=f"job/{number}", alive=("job/0",))
    with begin_attempt(layout, SHARD, "job/99", ("job/99",)) as attempt:
        assert attempt.careful
        assert not attempt.ended_workers(POSITION)


def test_deaths_on_machines_that_go_on_count_whoever_was_lost_in_between(tmp_path):
    layout = Layout(tmp_path)
    for _ in range(DEATHS + 1):
        die(layout, machine="job/0", alive=("job/0", "job/1"))
    die(layout, POSITION + 1, machine="job/1", alive=("job/0", "job/1"))
    with begin_attempt(layout, SHARD, "job/0", ("job/0",)) as attempt:
        assert attempt.ended_workers(POSITION)
        assert attempt.deaths[POSITION + 1] == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"careful": true}', b'{"position": 5, "deaths": {}}', b"[" * 10**5],
)
def test_after_a_damaged_file_an_attempt_is_careful(tmp_path, content):
    layout = Layout(tmp_path)
    layout.attempt(SHARD).parent.mkdir(parents=True)
    layout.attempt(SHARD).write_bytes(content)
    with begin_attempt(layout, SHARD, "job/1", ("job/1",)) as attempt:
        assert attempt.careful
    assert not layout.attempt(SHARD).exists()
