import io
from dataclasses import replace

import faiss
import numpy as np
import pytest

from edje_index.errors import ModelError
from edje_index.indexing.faiss_build import AnnRequest, build_ann
from edje_index.indexing.faiss_file import FaissFileError, check_faiss_file
from edje_index.indexing.faiss_index import AnnIndex
from pipelines.jobs.quantize import add_ann
from storage_formats import CorruptIndexError, Manifest
from storage_formats.format.file_check import FileEntry
from storage_formats.format.layout import IndexSpec
from storage_formats.format.manifest import CommittedIndex
from storage_formats.format.places import Directory
from storage_formats.reading.embeddings import read_embeddings
from tests.conftest import ann_path, write_random_index

SPEC = IndexSpec(300, 64, (2, 4), 12)
HOLES = frozenset({0, 70, 299})


@pytest.fixture
def own_root(tmp_path):
    """An index of its own for each test, to damage."""
    folder = tmp_path / "index"
    write_random_index(folder, SPEC, failed=HOLES)
    add_ann(folder)
    return folder


KINDS = {"Flat": "flat", "IVF17,Flat": "ivf-flat", "IVF17,PQ6x4fs": "ivf-pq"}


@pytest.mark.parametrize("factory", KINDS)
def test_nearest_rows_are_those_of_a_flat_search(own_root, factory):
    description = add_ann(own_root, AnnRequest(ann=factory, recall=np.float32(1))).ann
    assert (description["kind"], description["vectors"]) == (KINDS[factory], 297)
    opened = CommittedIndex.open(own_root)
    vectors = read_embeddings(opened, np.arange(SPEC.rows))
    kept = np.array([row for row in range(SPEC.rows) if row not in HOLES])
    oracle = faiss.IndexFlatIP(SPEC.embed_dim)
    oracle.add(vectors[kept])
    index = AnnIndex(opened)
    for row in kept[::25]:
        rows, scores = index.nearest(vectors[row], 7)
        _, (expected,) = oracle.search(vectors[row][None], 7)
        np.testing.assert_allclose(scores, vectors[rows] @ vectors[row], atol=1e-6)
        assert (np.diff(scores) <= 0).all()
        assert rows[0] == row
        # codes may miss a neighbour
        assert factory == "IVF17,PQ6x4fs" or rows.tolist() == kept[expected].tolist()
    assert len(index.nearest(vectors[1], 10_000)[0]) == 297
    with pytest.raises(ModelError, match="has width 5"):
        index.nearest(np.ones(5, np.float32), 1)
    # the same bytes
    request = AnnRequest(ann=factory)
    one, other = (
        build_ann(Directory(own_root), SPEC, request=request) for _ in range(2)
    )
    assert one == other


def test_a_damaged_or_missing_file_is_one_clear_error(own_root):
    path = ann_path(own_root)
    for damage, message in (
        (lambda: path.write_bytes(bytes(path.stat().st_size)), "has CRC-32C"),
        (lambda: path.write_bytes(b"nonsense"), "has 8 bytes instead of"),
        (path.unlink, "No such file or directory"),
    ):
        damage()
        with pytest.raises(CorruptIndexError, match=message) as error:
            AnnIndex(CommittedIndex.open(own_root))
        assert error.value.remedy == "verify"


def test_lists_on_disk_are_refused(own_root, tmp_path):
    """FAISS would open the file that holds the lists for writing, whatever its path."""
    kept = np.array([row for row in range(SPEC.rows) if row not in HOLES])
    vectors = read_embeddings(CommittedIndex.open(own_root), kept)
    lists = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(SPEC.embed_dim), SPEC.embed_dim, 1, faiss.METRIC_INNER_PRODUCT
    )
    lists.train(vectors)
    on_disk = faiss.OnDiskInvertedLists(1, lists.code_size, str(tmp_path / "lists"))
    lists.replace_invlists(on_disk)
    lists.add_with_ids(vectors, np.arange(len(vectors)))
    layout = Directory(own_root)
    manifest = Manifest.load(own_root)
    faiss.write_index(lists, str(layout.ann / "index.faiss"))
    files = [FileEntry.of(layout, layout.ann / "index.faiss").to_json()]
    replace(manifest, ann={**manifest.ann, "files": files}).write(layout)
    with pytest.raises(
        CorruptIndexError,
        match="contains the structure 'ilod' instead of ilar",
    ):
        AnnIndex(CommittedIndex.open(own_root))


@pytest.mark.parametrize("factory", ["Flat", "IVF3,Flat", "IVF3,PQ2x4fs"])
def test_damage_behind_a_correct_checksum_is_an_error_or_harmless(tmp_path, factory):
    """Sizes and ids that are huge or negative, and files that end early, never
    reach FAISS.
    """
    write_random_index(
        tmp_path / "index",
        IndexSpec(121, 64, (1, 1), 4),
    )
    manifest = add_ann(tmp_path / "index", AnnRequest(ann=factory))
    path = tmp_path / "index" / manifest.ann_files[0].path
    sound = path.read_bytes()
    refused = 0
    damaged = [sound[:length] for length in range(0, len(sound), 7)]
    for offset in range(len(sound) - 7):
        for value in (1 << 40, -1, 200):
            damaged.append(
                sound[:offset]
                + value.to_bytes(8, "little", signed=True)
                + sound[offset + 8 :]
            )
    for data in damaged:
        try:
            check_faiss_file(data, dimensions=4, vectors=121, rows=121)
        except FaissFileError:
            refused += 1
            continue
        index = faiss.read_index(faiss.PyCallbackIOReader(io.BytesIO(data).read))
        if hasattr(index, "nprobe"):
            # as a search of `AnnIndex` does
            index.nprobe = min(index.nprobe, index.nlist)
        _, rows = index.search(np.ones((1, 4), np.float32), 121)
        assert ((rows >= -1) & (rows < 121)).all()
    assert len(sound) < refused < len(damaged)
