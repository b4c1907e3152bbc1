"""Lists of inputs: every field and row is read back, whatever the shards, and
damage is one clear error.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.images.decode import REASONS
from edje_index.inputs import input_lists
from edje_index.inputs.containers import ARCHIVES, Container
from edje_index.inputs.input_lists import read_shard_inputs, write_input_lists
from edje_index.inputs.refs import InputRef, display_path
from storage_formats.errors import CorruptIndexError
from storage_formats.format.layout import IndexSpec, Segment
from storage_formats.format.places import Directory

PATHS = st.binary(min_size=1, max_size=40).filter(lambda path: b"\0" not in path)
REFS = st.builds(
    InputRef,
    uri=PATHS.map(display_path),
    path=PATHS,
    offset=st.integers(0, 2**62),
    size=st.none() | st.integers(0, 2**62),
    container=st.none()
    | st.builds(
        Container, st.sampled_from(list(ARCHIVES)), st.integers(0, 2**62), st.text()
    ),
    content_hash=st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex),
    duplicate_of=st.none() | st.integers(0, 2**62),
    problem=st.none() | st.sampled_from(REASONS),
)


def layout_in(folder):
    layout = Directory(folder)
    layout.input_lists.mkdir(parents=True)
    return layout


def spec_of(rows, shard_size, first_shard=0):
    segments = (Segment(first_shard * shard_size, rows),)
    return IndexSpec(segments[0].stop, shard_size, (4, 16), 24, segments=segments)


@given(
    st.lists(REFS, min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(0, 9),
    st.integers(1, 8),
    st.integers(1, 4),
)
@settings(max_examples=20)
def test_every_shard_is_read_back(
    tmp_path_factory, refs, shard_size, first_shard, list_rows, group_rows
):
    layout = layout_in(tmp_path_factory.mktemp("lists"))
    spec = spec_of(len(refs), shard_size, first_shard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_lists, "LIST_ROWS", list_rows)
        patch.setattr(input_lists, "_GROUP_ROWS", group_rows)
        paths = write_input_lists(
            layout, iter(refs), shard_size, first_shard=first_shard
        )
        shards = {
            shard: read_shard_inputs(layout, spec, shard)
            for shard in spec.shard_numbers()
        }
    assert [ref for shard in sorted(shards) for ref in shards[shard]] == refs
    assert all(len(shards[shard]) == len(spec.shard_rows(shard)) for shard in shards)
    assert paths == sorted(layout.input_lists.iterdir())
    row_ids = [pq.read_table(path)["row_id"].to_pylist() for path in paths]
    first = first_shard * shard_size
    assert np.concatenate(row_ids).tolist() == [*range(first, first + len(refs))]
    for rows in row_ids:
        assert rows[0] % shard_size == 0
        assert len(rows) <= max(list_rows, shard_size)


def test_a_missing_cut_or_short_list_is_one_clear_error(tmp_path):
    layout = layout_in(tmp_path)
    spec = spec_of(10, 4)
    with pytest.raises(
        CorruptIndexError, match=r"inputs/00000000\.parquet.*No such file"
    ):
        read_shard_inputs(layout, spec, 0)
    (path,) = write_input_lists(layout, [InputRef("a", b"a")] * 9, 4)
    with pytest.raises(
        CorruptIndexError,
        match="does not list the rows 8 to 9 in order; start the build again",
    ):
        read_shard_inputs(layout, spec, 2)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptIndexError, match="cannot read the list of inputs"):
        read_shard_inputs(layout, spec, 0)
