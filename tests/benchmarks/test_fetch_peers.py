from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fetch.records import StoredRecords
from benchmarks.fetch.subjects import PEERS, installed_version, subject_class
from storage_formats import TokenStore
from tests.benchmarks.conftest import SPEC
from tests.conftest import same_bits

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.mark.parametrize("precision", SPEC.precisions)
@pytest.mark.parametrize("name", PEERS)
def test_every_peer_gives_the_blocks_of_the_store(index, tmp_path, name, precision, monkeypatch):
    if installed_version(name) is None:
        pytest.skip(f"{subject_class(name).package} is not installed")
    source = StoredRecords(index, precision)
    monkeypatch.setattr("benchmarks.fetch.peers_databases._ARROW_BYTES", 100 * source.record_bytes)  # answers in parts
    peer = subject_class(name)(source, tmp_path, {})
    if peer.copies:
        peer.prepare()
        length = sum(path.stat().st_size for path in peer.files())
        assert length >= source.rows * source.record_bytes
        if name != "np.memmap MADV_RANDOM":  # which reads another's
            assert length <= peer.copy_bytes(source.rows, source.record_bytes)
    else:
        assert peer.files() == source.files()
    ids = np.random.default_rng(0).permutation(source.rows)[:140]
    peer.open()
    for part in (ids, ids[:1]):
        found = peer.fetch(part, np.zeros((len(part), peer.output_bytes), dtype=np.uint8))
        assert (found == source.read(part)).all()
        blocks = source.codec.decode(np.ascontiguousarray(found))
        assert same_bits(blocks, TokenStore.open(index, precision).fetch(part))
    peer.close()


@pytest.mark.parametrize("name", ["edje", "memcpy", "direct probe"])
@pytest.mark.parametrize("precision", SPEC.precisions)
def test_our_own_subjects_give_what_they_say(index, tmp_path, name, precision):
    source = StoredRecords(index, precision)
    subject = subject_class(name)(source, tmp_path, {"depth": 3, "merge": True})
    ids = np.arange(120, 140)
    subject.open()
    found = subject.fetch(ids, np.ones((len(ids), subject.output_bytes), dtype=np.uint8))
    assert (found == subject.expected(ids)).all()
    subject.close()


@pytest.mark.parametrize("merge", [False, True])
def test_the_probe_reads_every_sector_of_what_is_asked_and_no_other(index, tmp_path, merge):
    source = StoredRecords(index, "fp8")
    probe = subject_class("direct probe")(source, tmp_path, {"depth": 3, "merge": merge})
    ids = np.arange(100, 200)
    size, unit = source.record_bytes, source.sector_bytes
    sectors = {
        (shard, sector)
        for shard, offset, length in probe._extents(ids)
        for sector in range(offset // unit, (offset + length) // unit)
    }
    assert sectors == {
        (row // 128, sector)
        for row in ids.tolist()
        for sector in range(row % 128 * size // unit, (row % 128 * size + size - 1) // unit + 1)
    }
    assert (len(list(probe._extents(ids))) < 5) == merge
