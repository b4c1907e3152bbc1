"""`edje-index quantize` killed with SIGKILL at random moments: readable all the while, resumed to the same bytes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from storage_formats import IndexSpec, Manifest, TokenStore, verify_index
from tests.command_line import command, environment, run_process
from tests.conftest import same_bits, write_random_index
from tests.integration.test_crashes import victims

SPEC = IndexSpec(rows=1533, shard_size=64, block_shape=(16, 64), embed_dim=8)
HOLES = {"failed": frozenset({0, 7, 640}), "duplicates": frozenset({8, 1532})}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A folder with an index, the same one quantized without any crash, and the blocks that the first holds."""
    folder = tmp_path_factory.mktemp("quantize_crashes")
    blocks = write_random_index(folder / "before", SPEC, **HOLES)
    shutil.copytree(folder / "before", folder / "calm")
    run_process(*quantize(folder / "calm", "inline"))
    return folder, blocks


def quantize(root: Path, engine: str) -> list[str | Path]:
    return ["quantize", root, "--to", "fp8", "--to", "nvfp4", "--drop", "bf16", "--engine", engine]


def files(root: Path) -> dict[str, bytes]:
    """Every file of an index that is not of a run under way."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "build" not in path.relative_to(root).parts
    }


ADDED, DROPPED = 1000, 2000


def steps(root: Path) -> int:
    """Something that grows as a run goes on: files written, then `ADDED` or more, then `DROPPED` or more."""
    held = Manifest.load(root).spec.precisions
    if "bf16" not in held:
        return DROPPED
    return ADDED if "fp8" in held else sum(len(names) for _, _, names in os.walk(root))


def kill_at(process: subprocess.Popen, root: Path, kind: str, step: int, delay: float) -> bool:
    """SIGKILL a process of `kind` `delay` seconds after `root` has reached `step`; False where the run ended before."""
    while process.poll() is None:
        if steps(root) >= step:
            time.sleep(delay)
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                found = victims(process, "driver" if kind == "inline" else kind)
                if found and process.poll() is None:
                    os.kill(found[0].pid, signal.SIGKILL)
                    return True
        time.sleep(0.001)
    return False


def check_readable(root: Path, calm: Path, blocks: np.ndarray) -> None:
    """Nothing is lost: what `index.json` names is whole, and each precision reads as it should."""
    assert verify_index(root) == []
    held = Manifest.load(root).spec.precisions
    assert held in [("bf16",), ("bf16", "fp8", "nvfp4"), ("fp8", "nvfp4")]
    ids = np.random.default_rng(0).integers(0, SPEC.rows, 200)
    for name in held:
        expected = blocks[ids] if name == "bf16" else TokenStore.open(calm, name).fetch(ids)
        holes = np.isnan(expected[:, 0, 0].astype(np.float32))
        found = TokenStore.open(root, name).fetch(ids)
        assert same_bits(found[~holes], expected[~holes])
        assert np.isnan(found[holes].astype(np.float32)).all()


def crash_and_resume(case: tuple[Path, np.ndarray], root: Path, kind: str, chance: random.Random, kills: int) -> None:
    """Kill `kills` runs one after another, each at a random step, then let one finish and compare all bytes.

    A run that ends before its step, or before the blow fell, does not count.
    """
    folder, blocks = case
    shutil.copytree(folder / "before", root)
    first = steps(root)
    hits = 0
    for _ in range(4 * kills):
        late = [ADDED, DROPPED] if kind in ("inline", "driver") else []  # workers are gone by then
        step = chance.choice([chance.randint(first, first + 5 * SPEC.shards)] * 2 + late)
        process = subprocess.Popen(
            command(*quantize(root, "inline" if kind == "inline" else "ray")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        hit = kill_at(process, root, kind, step, chance.uniform(0, 0.01))
        said = process.communicate(timeout=120)
        hits += hit
        check_readable(root, folder / "calm", blocks)
        if kind == "worker":
            assert process.returncode == 0, said  # the engine gives the shard to another worker
        if process.returncode == 0:
            assert files(root) == files(folder / "calm")
            shutil.rmtree(root)
            shutil.copytree(folder / "before", root)
        if hits == kills:
            break
    assert hits == kills
    run_process(*quantize(root, "inline"))
    check_readable(root, folder / "calm", blocks)
    assert files(root) == files(folder / "calm")
    assert not (root / "build").exists()


def test_a_killed_conversion_resumes_to_the_same_bytes(case, tmp_path):
    crash_and_resume(case, tmp_path / "index", "inline", random.Random("inline"), 1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("inline", 8), ("driver", 5), ("worker", 5), ("raylet", 2)])
def test_twenty_kills_at_random_moments(case, tmp_path, kind, kills):
    crash_and_resume(case, tmp_path / "index", kind, random.Random(f"slow {kind}"), kills)
