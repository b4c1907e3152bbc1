"""Selections of rows, compared with plain lists."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from storage_formats.format.layout import IndexSpec, Segment
from storage_formats.format.selection import Selection
from storage_formats.format.tombstones import Tombstones

SEGMENTS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=4)


@given(SEGMENTS, st.integers(1, 7), st.sets(st.integers(0, 100)), st.data())
def test_ranks_and_row_ids_are_those_of_a_list(sizes, shard_size, chosen, data):
    segments: list[Segment] = []
    for rows, gap in sizes:
        next_shard = -(-segments[-1].stop // shard_size) if segments else 0
        segments.append(Segment((next_shard + gap) * shard_size, rows))
    spec = IndexSpec(segments[-1].stop, shard_size, (2, 8), 4, segments=tuple(segments))
    used = [row for segment in segments for row in range(segment.first_row, segment.stop)]
    left_out = sorted(chosen & set(used))
    deleted = Tombstones.none(shard_size).with_rows(left_out)
    selection = Selection.of(SimpleNamespace(manifest=SimpleNamespace(spec=spec), deleted=deleted))
    rows = [row for row in used if row not in left_out]
    assert len(selection) == len(rows)
    assert [row for row_ids, _ in selection.by_shard() for row in row_ids.tolist()] == rows
    assert [rank for _, ranks in selection.by_shard() for rank in ranks.tolist()] == list(range(len(rows)))
    requested = data.draw(st.lists(st.integers(-5, 130)))
    expected = [rows.index(row) if row in rows else -1 for row in requested]
    np.testing.assert_array_equal(selection.ranks_of(requested), expected)
    if rows:
        start = data.draw(st.integers(0, len(rows) - 1))
        stop = data.draw(st.integers(start + 1, len(rows)))
        assert selection.row_ids(range(start, stop)).tolist() == rows[start:stop]
