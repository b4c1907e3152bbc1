from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage_formats import UsageError, codec, precisions
from storage_formats.codecs import fill_record


@given(hnp.arrays(np.uint16, st.tuples(st.integers(0, 5), st.just(3), st.just(8))))
def test_bf16_keeps_every_bit(bits):
    entry = codec("bf16", (3, 8))
    blocks = bits.view(ml_dtypes.bfloat16)
    records = entry.encode(blocks)
    assert (records.dtype, records.shape) == (np.uint8, (len(bits), 48))
    assert (entry.decode(records).view(np.uint16) == bits).all()


@pytest.mark.parametrize("name", precisions())
def test_fill_record_decodes_to_nan(name):
    entry = codec(name)
    assert entry.block_shape == (64, 384)
    record = fill_record(entry)
    assert record.shape == (1, entry.record_bytes)
    assert np.isnan(entry.decode(record).astype(np.float32)).all()


@pytest.mark.parametrize("name", precisions())
def test_arrays_of_another_kind_are_refused(name):
    entry = codec(name, (3, 8))
    with pytest.raises(UsageError, match="blocks must be bfloat16"):
        entry.encode(np.zeros((1, 3, 8), np.float32))
    with pytest.raises(UsageError, match="blocks must be bfloat16"):
        entry.encode(np.zeros((1, 8, 3), ml_dtypes.bfloat16))
    with pytest.raises(UsageError, match="records must be uint8"):
        entry.decode(np.zeros((1, entry.record_bytes + 1), np.uint8))
    with pytest.raises(UsageError, match="out must be"):
        entry.decode(np.zeros((1, entry.record_bytes), np.uint8), out=np.zeros((2, 3, 8), ml_dtypes.bfloat16))


def test_unknown_precision_is_refused():
    with pytest.raises(UsageError, match="unknown precision 'fp3'; known: bf16"):
        codec("fp3")
