from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fetch.records import StoredRecords
from storage_formats import TokenStore
from tests.benchmarks.conftest import SPEC
from tests.conftest import same_bits


@pytest.mark.parametrize("precision", SPEC.precisions)
def test_plain_reads_are_what_the_store_gives(index, precision):
    source = StoredRecords(index, precision)
    ids = np.array([299, 0, 128, 127, 5])
    blocks = source.codec.decode(source.read(ids))
    assert same_bits(blocks, TokenStore.open(index, precision).fetch(ids))
    whole = np.concatenate([records for _, records in source.shards()])
    assert (whole[ids] == source.read(ids)).all()
    assert [first for first, _ in source.shards()] == [0, 128, 256]


@pytest.mark.parametrize("precision", SPEC.precisions)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 299), min_size=1))
def test_asked_pages_are_counted_once(index, precision, ids):
    source = StoredRecords(index, precision)
    size = source.record_bytes
    touched = {
        (row // 128, page)
        for row in ids
        for page in range(row % 128 * size // 4096, (row % 128 * size + size - 1) // 4096 + 1)
    }
    assert source.requested_bytes(np.array(ids)) == (len(set(ids)) * size, len(touched) * 4096)
    assert source.direct_bytes % source.sector_bytes == 0
    assert 0 <= source.direct_bytes - size < source.sector_bytes
