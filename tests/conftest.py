"""Fixtures that the tests of several packages share."""

import atexit
import contextlib
import functools
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from storage_formats import IndexWriter
from storage_formats.change import remove_build, write_array_shapes
from storage_formats.format.manifest import CommittedIndex, Manifest, created_by
from storage_formats.format.places import Directory
from storage_formats.format.rows import (
    DUPLICATE,
    RowEntry,
    iter_row_groups,
    rows_table,
)
from storage_formats.remote import objects
from storage_formats.upgrade import upgrade_index
from storage_formats.verify import verify_index
from storage_formats.writing.publish import total_counts, write_tables
from storage_formats.writing.shard_writer import ShardWriter
from tests.object_store import FaultyProxy, s3_server, use_endpoint

# a busy machine is no failure
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")

# until all tests are imported, see `pytest_collection_finish`
gc.disable()

# The tests start hundreds of processes. Where Python writes no bytecode, each would
# compile the packages again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# threads that wait actively take the time of other processes
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

REPO = Path(__file__).resolve().parents[1]
# a file system in memory, and a directory on a disk
MEMORY = Path("/dev/shm")
DISK = Path("/var/tmp")
# each loads torch
MOST_WORKERS = 5
SHARE_SERVERS = (
    "tests/pipelines/service",
    "tests/hostile",
    "tests/faults",
    "tests/pipelines/test_engines.py",
)


def pytest_xdist_auto_num_workers(config):
    """Processes that share the default suite. They are more than the CPUs, because many
    tests wait for other processes.

    Tests that are named, and slow ones, run in this process.
    """
    is_default_suite = {Path(name).resolve() for name in config.args} == {
        REPO / "tests"
    }
    if not is_default_suite or config.option.markexpr != "not slow":
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return min((os.cpu_count() or 1) + 1, MOST_WORKERS)


def pytest_configure(config):
    """Keep temporary files of the default suite in memory, because most tests flush
    many small files.
    """
    if config.option.markexpr != "not slow" or "TMPDIR" in os.environ:
        return
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 << 30:
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None


def pytest_collection_modifyitems(items):
    """Begin with the tests that share a server, so that one worker runs them: a worker
    that has nothing left takes the last tests of another.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(SHARE_SERVERS))


def pytest_collection_finish():
    """Let the collector never visit what was imported: about a million objects."""
    gc.freeze()
    gc.enable()


def random_blocks(rng, count, spec):
    """Finite bfloat16 blocks [count, m, d]."""
    return rng.standard_normal((count, *spec.block_shape), dtype=np.float32).astype(
        ml_dtypes.bfloat16
    )


def finish_index(
    root,
    spec,
    receipts,
    columns=(),
):
    """Commit an index whose shards are written."""
    origin = {
        "model": {"fingerprint": "f" * 64},
        "settings": {},
        "plan": "plan",
        "ann": {"kind": "none"},
    }
    place = Directory(root)
    Manifest(
        spec=spec,
        counts=total_counts(receipts),
        columns=tuple(columns),
        created_by=created_by(),
        **origin,
        **write_tables(place, spec, receipts, columns),
    ).write(place)
    write_array_shapes(place, spec)
    remove_build(place)
    Directory(root).build.rmdir()


def write_random_index(
    root,
    spec,
    *,
    failed=frozenset(),
    duplicates=frozenset(),
    zeros=frozenset(),
    seed=7,
):
    """A finished index of random blocks; returns what it should hold, bfloat16
    [rows, m, d], NaN at holes.
    """
    rng = np.random.default_rng(seed)
    blocks = random_blocks(rng, spec.rows, spec)
    blocks[sorted(zeros)] = 0
    embeddings = rng.standard_normal((spec.rows, spec.embed_dim), dtype=np.float32)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    receipts = []
    for shard in range(spec.shards):
        rows = np.array(spec.shard_rows(shard))
        records = [
            RowEntry(
                int(row), f"/photos/{row}.jpg", size=row, content_hash=f"{row:064x}"
            )
            for row in rows
        ]
        for record in records:
            if record.row_id in failed:
                record.fail("truncated", "ends early")
            elif record.row_id in duplicates:
                record.status = DUPLICATE
                record.duplicate_of = 0
        kept = np.array(
            [row for row in rows if row not in failed | duplicates], dtype=np.int64
        )
        with ShardWriter(Directory(root), spec, shard) as writer:
            for part in np.array_split(kept, 3):
                writer.put(part - rows[0], blocks[part], embeddings[part])
            receipts.append(writer.commit(rows_table(records), "plan", {"write": 0.0}))
    finish_index(root, spec, receipts)
    expected = blocks.copy()
    expected[sorted(failed | duplicates)] = np.nan
    return expected


def write_arrays(root, blocks, embeddings, rows=None, **options):
    """Write an index of arrays."""
    shape = {"block_shape": blocks[0].shape, "embed_dim": len(embeddings[0])}
    with IndexWriter.create(root, **{**shape, **options}) as writer:
        writer.append(blocks, embeddings, rows)


def write_files(folder, files):
    """Write text files in `folder`, by relative path."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def environment():
    """This process's environment, with the source tree importable from any folder."""
    return {**os.environ, "PYTHONPATH": str(REPO)}


def all_files(root):
    """The content of all files, by relative path."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root): path.read_bytes() for path in files}


def same_bits(left, right):
    """Whether two bfloat16 arrays hold the same bits, NaN included."""
    return left.shape == right.shape and bool(
        (left.view(np.uint16) == right.view(np.uint16)).all()
    )


class Command:
    """Runs `edje-index ARGUMENTS` in this process."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *arguments):
        """The exit code, the standard output and the standard error."""
        from pipelines.cli import main

        code = main([*map(str, arguments)])
        return code, *self._capsys.readouterr()

    def ok(self, *arguments):
        """The output of a command that succeeds."""
        code, out, err = self(*arguments)
        assert code == 0, (arguments, out, err)
        return out

    def json(self, *arguments):
        """The object that a command that succeeds prints."""
        return json.loads(self.ok(*arguments, "--json"))

    def refused(self, *arguments):
        """The message of a command that is refused and prints nothing."""
        code, out, err = self(*arguments)
        assert (code, out) == (2, ""), (arguments, err)
        return err


@pytest.fixture
def run(capsys):
    return Command(capsys)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory):
    """A model bundle of random weights with 4 x 16 blocks."""
    from edje_index.bundles.random_bundle import TINY, create_untrained_bundle

    path = tmp_path_factory.mktemp("models") / "tiny"
    create_untrained_bundle(path, sizes=TINY)
    return path


@contextlib.contextmanager
def largest_file(size):
    """This process cannot write beyond `size` bytes in a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def tiny_model(tiny_bundle):
    """`tiny_bundle`, loaded."""
    from edje_index.bundles.bundle import ModelBundle

    return ModelBundle.load(tiny_bundle)


@pytest.fixture(scope="session")
def disk():
    """A directory that is not in memory, for tests of direct reads and of the page
    cache.
    """
    with tempfile.TemporaryDirectory(dir=DISK) as folder:
        yield Path(folder)


@pytest.fixture(scope="session", autouse=True)
def signals_are_heard():
    """Undo the ignoring of signals that tests started with nohup or in the
    background inherit.
    """
    for number, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster without nodes, see `RayNodes`."""
    # imports this module
    from tests.integration.ray_nodes import ray_nodes

    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture
def nodes(cluster):
    yield cluster
    cluster.remove_all()


@pytest.fixture
def one_faiss_thread():
    """Threads of FAISS wait for each other actively, which is slow for small
    indexes on a busy machine.
    """
    import faiss

    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)


@pytest.fixture(scope="session")
def server():
    """The URL of an S3-compatible server."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server, monkeypatch):
    """A proxy in front of the server, which `s3://` URLs lead to."""
    with FaultyProxy(server).running() as running:
        use_endpoint(monkeypatch, running.url)
        yield running


@functools.cache
def golden_index():
    """Return the path of an upgraded copy of the index of release 0.1."""
    folder = Path(tempfile.mkdtemp(prefix="edje-golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    root = folder / "index"
    shutil.copytree(REPO / "tests/golden/release_0_1/index", root)
    upgrade_index(root)
    return root


def rows_path(root, row_id=0):
    """Return the path of the rows file with a row."""
    manifest = Manifest.load(root)
    shard = row_id // manifest.spec.shard_size
    files = [each.file for each in manifest.rows_files if each.first_shard <= shard]
    return root / files[-1].path


def ann_path(root):
    """Return the path of the first FAISS file."""
    return root / Manifest.load(root).ann_files[0].path


def problems_and_counts(root):
    """Return the problems of an index, and the names of the source columns with another
    number of values than `index.json` lists.
    """
    index = CommittedIndex.open(root)
    columns = index.manifest.columns
    names = [column.name for column in columns]
    counts = dict.fromkeys(names, 0)
    for table in iter_row_groups(index, ["row_id", *names]):
        for name in names:
            counts[name] += len(table) - table[name].null_count
    miscounted = [each.name for each in columns if each.values != counts[each.name]]
    return [*verify_index(root), *miscounted]


@pytest.fixture
def memory_stores(tmp_path, monkeypatch):
    """Every URL has an object store in memory."""
    store = pytest.importorskip("obstore.store")
    made = {}
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        objects, "_open_store", lambda url: made.setdefault(url, store.MemoryStore())
    )
