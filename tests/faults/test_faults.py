"""Faults of the operating system at every operation on a file: errors, short reads and writes, the process killed.

After each of them the command has ended with one error line, and the same command brings the index to the same bytes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from storage_formats import EdjeError, verify_index
from tests.faults.cases import Case, make_cases
from tests.faults.injection import FAULTS, Fault, FaultServer, Outcome, fault_server

CASES = ("build", "import-arrays", "quantize")
SAMPLE = {"EIO": 1, "ENOSPC": 1, "EINTR": 1, "short": 1, "kill": 1}
"""Operations per command that meet each fault in the default suite."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD and /proc are used as on Linux")


@dataclass(frozen=True)
class Bench:
    """A case on one server.

    Attributes:
        server: runs its command, with the libraries loaded.
        folder: operations below it count.
        index: where the command writes.
        operations: operations of an undisturbed run.
        expected: contents after an undisturbed run.
    """

    case: Case
    server: FaultServer
    folder: Path
    index: Path
    operations: list[str]
    expected: dict[str, Any]

    @classmethod
    def of(cls, case: Case, server: FaultServer, folder: Path, index: Path) -> Bench:
        case.prepare(index)
        calm = server.run(case.arguments(index), folder)
        assert calm.code == 0, calm.output
        return cls(case, server, folder, index, calm.operations, case.contents(index))

    def places(self, fault: Fault) -> list[int]:
        """Numbers of the operations that can meet `fault`."""
        return [at for at, line in enumerate(self.operations, 1) if line.split()[0] in fault.operations]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) to make the library that injects faults")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="module")
def benches(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bench]]:
    """A bench for each case on a server that has loaded the libraries of every command."""
    folder = tmp_path_factory.mktemp("faults")
    index, cases = folder / "index", make_cases(folder)
    with fault_server(shim, folder.parent / f"{folder.name}.log") as server:
        for case in cases.values():
            case.prepare(index)
            server.load([*case.arguments(index), "--quiet"])
        yield {name: Bench.of(case, server, folder, index) for name, case in cases.items()}


def wrong_end(fault: Fault, outcome: Outcome) -> str | None:
    """What is wrong with the end of a command that met a fault."""
    errors = [line for line in outcome.output.splitlines() if line.startswith("error:")]
    if fault.kind == "kill" and outcome.code == -9:
        return None
    if outcome.code not in (0, 1):
        return f"exit code {outcome.code}"
    if len(errors) != outcome.code:
        return f"exit code {outcome.code} with {len(errors)} errors"
    if "Traceback" in outcome.output or "unexpected" in outcome.output:
        return "an unexpected error"
    return None


def wrong_index(bench: Bench, outcome: Outcome) -> str | None:
    """What is wrong with the index after the same command ran again, if there was a reason to run it again."""
    index = bench.index
    is_done = bench.case.refuses_finished and (index / "index.json").exists()
    if not is_done and (outcome.code != 0 or (index / "build").exists()):
        again = bench.server.run(bench.case.arguments(index), bench.folder)
        if again.code != 0 or (index / "build").exists():
            return f"the same command gives exit code {again.code}: {again.output[-500:]}"
    try:
        if problems := verify_index(index):
            return f"verify: {problems}"
    except EdjeError as error:
        return f"verify: {error}"
    contents = bench.case.contents(index)
    differing = {name for name in contents.keys() | bench.expected if contents.get(name) != bench.expected.get(name)}
    return f"other contents: {sorted(differing)}" if differing else None


def problem_at(bench: Bench, name: str, at: int) -> str | None:
    """What is wrong after operation `at` met the fault `name`."""
    bench.case.prepare(bench.index)
    fault = FAULTS[name]
    outcome = bench.server.run(bench.case.arguments(bench.index), bench.folder, fault, at)
    if not any(line.startswith("FAULT") for line in outcome.operations):
        return None if outcome.code == 0 else f"{name} at operation {at}: not injected\n{outcome.output}"
    problem = wrong_end(fault, outcome) or wrong_index(bench, outcome)
    struck = next(line for line, following in pairwise(outcome.operations) if following.startswith("FAULT"))
    return problem and f"{name} at operation {at} ({struck}): {problem}\n{outcome.output}"


@pytest.mark.parametrize(
    "name", ["build", *(pytest.param(name, marks=pytest.mark.slow) for name in ("quantize", "import-arrays"))]
)
def test_a_fault_costs_no_more_than_another_run(benches, name):
    bench = benches[name]
    for kind, count in SAMPLE.items():
        places = bench.places(FAULTS[kind])
        assert len(places) > 10
        for number in range(count):
            problem = problem_at(bench, kind, places[(2 * number + 1) * len(places) // (2 * count)])
            assert not problem, problem


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_at_every_operation(benches, name, kind):
    problems = [
        problem for at in benches[name].places(FAULTS[kind]) if (problem := problem_at(benches[name], kind, at))
    ]
    assert not problems, f"{len(problems)} problems, the first: {problems[0]}"
