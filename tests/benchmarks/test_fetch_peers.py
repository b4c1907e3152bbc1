"""Every peer and every reference measurement returns the blocks that it should."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fetch import peers
from benchmarks.fetch.peers import PEERS, SUBJECTS, installed_version
from benchmarks.fetch.subjects import Entry, StoredRecords
from storage_formats import TokenStore
from tests.benchmarks.conftest import SPEC
from tests.conftest import same_bits

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.mark.parametrize("precision", SPEC.precisions)
@pytest.mark.parametrize("name", PEERS)
def test_every_peer_gives_the_blocks_of_the_store(index, tmp_path, name, precision, monkeypatch):
    if installed_version(name) is None:
        pytest.skip(f"{PEERS[name].package} is not installed")
    source = StoredRecords(index, precision)
    monkeypatch.setattr(peers, "_ARROW_BYTES", 100 * source.record_bytes)  # answers in parts
    peer = PEERS[name](source, tmp_path)
    if peer.copies:
        peer.prepare()
        length = sum(path.stat().st_blocks * 512 for path in peer.files())
        assert length >= SPEC.rows * source.record_bytes
        if peer.copy_ratio:
            assert length <= peer.copy_ratio * SPEC.rows * source.record_bytes + (1 << 20)
    else:
        assert peer.files() == source.files()
    ids = np.random.default_rng(0).permutation(SPEC.rows)[:140]
    peer.open()
    for part in (ids, ids[:1]):
        records = peer.fetch(part, np.zeros((len(part), peer.output_bytes), dtype=np.uint8))
        assert (records == source.read(part)).all()
        blocks = source.codec.decode(np.ascontiguousarray(records))
        assert same_bits(blocks, TokenStore.open(index, precision).fetch(part))
    peer.close()


@pytest.mark.parametrize("pattern", ["random", "contiguous"])
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name not in PEERS])
@pytest.mark.parametrize("precision", SPEC.precisions)
def test_our_own_subjects_give_what_they_say(index, tmp_path, name, precision, pattern):
    source = StoredRecords(index, precision)
    subject = SUBJECTS[name](source, tmp_path, Entry(name, name, pattern, 20, 20))
    ids = np.arange(120, 140)
    subject.open()
    fetched = subject.fetch(ids, np.ones((len(ids), subject.output_bytes), dtype=np.uint8))
    assert (fetched == subject.expected(ids)).all()
    subject.close()
