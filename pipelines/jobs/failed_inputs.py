"""Limits the number of failed inputs of a build."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING

from pipelines.planning.plan import BuildPlan
from pipelines.progress.wording import counted
from storage_formats.errors import EdjeError
from storage_formats.format.layout import Layout

if TYPE_CHECKING:
    from storage_formats.format.receipts import ShardReceipt

DEFAULT_SHARE = 0.01
ALWAYS_ALLOWED = 20
"""By default, this many inputs may always fail, because small collections have damaged files, too."""

_NAMED_FAILURES = 3
_NEEDS_ONE_INDEXED = ("build", "append")  # other changes record what failed, even if nothing else is new


class FailedInputsError(EdjeError):
    """No input could be indexed, or more inputs failed than allowed.

    Attributes:
        problem: the error message without advice.
        over_limit: True if a larger `max_failed` lets the build continue.
    """

    def __init__(self, problem: str, remedy: str, *, over_limit: bool) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem
        self.over_limit = over_limit


class FailureLimit:
    """Counts the failed inputs of a build, and raises an error if too many inputs failed.

    Args:
        plan: plan of the build.
        max_failed: maximum share of failed inputs, 0 to 1. None allows 1 % of the inputs, but at least `ALWAYS_ALLOWED`
            inputs.
    """

    def __init__(self, plan: BuildPlan, max_failed: float | None) -> None:
        self._plan = plan
        rows = plan.rows
        if max_failed is None:
            self._allowed = max(ALWAYS_ALLOWED, math.floor(DEFAULT_SHARE * rows))
            self._limit = f"the {self._allowed:,} that may fail by default"
        else:
            self._allowed = math.floor(max_failed * rows + 1e-6)  # 0.29 * 100 is less than 29
            self._limit = f"the share of {max_failed:g} that may fail"
        self._failed: Counter[str] = Counter()
        self._receipts: list[ShardReceipt] = []

    def __call__(self, receipt: ShardReceipt) -> None:
        """Count the failed inputs of a finished shard.

        Raises:
            FailedInputsError: too many inputs have failed, or all shards are finished and no input was indexed.
        """
        self._receipts.append(receipt)
        self._failed.update(receipt.failed)
        if self._failed.total() > self._allowed:
            raise self._over_limit()
        is_last = len(self._receipts) == len(self._plan.shards)
        if (
            self._plan.change in _NEEDS_ONE_INDEXED
            and is_last
            and not any(receipt.indexed for receipt in self._receipts)
        ):
            raise self._none_indexed()

    def _over_limit(self) -> FailedInputsError:
        done = sum(receipt.rows for receipt in self._receipts)
        so_far = "" if done == self._plan.rows else " so far"
        problem = (
            f"{self._failed.total():,} of {counted(done, 'input')} failed{so_far}, more than {self._limit} "
            f"({_reasons(self._failed)}). The first are {_first_failures(self._plan, self._receipts)}"
        )
        return FailedInputsError(
            f"{problem}. {len(self._receipts):,} of {counted(len(self._plan.shards), 'shard')} are finished and kept",
            f"raise max_failed to index the other inputs; or correct the sources, {self._plan.restart}",
            over_limit=True,
        )

    def _none_indexed(self) -> FailedInputsError:
        """Return the error to raise if no input could be indexed."""
        plan = self._plan
        unchanged = "nothing was appended" if plan.is_append else "no index was written"
        return FailedInputsError(
            f"none of the {counted(self._failed.total(), 'input')} could be indexed ({_reasons(self._failed)}), so "
            f"{unchanged}. The first are {_first_failures(plan, self._receipts)}",
            "correct the sources and append again" if plan.is_append else f"correct the sources, {plan.restart}",
            over_limit=False,
        )


def _reasons(failed: Counter[str]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(failed.items()))


def _first_failures(plan: BuildPlan, receipts: list[ShardReceipt]) -> str:
    """Return a text with the uris and reasons of the first failed inputs."""
    from storage_formats.format.rows import FAILED, read_shard_rows

    layout, columns = Layout(plan.root), ["uri", "status", "reason"]
    failed_shards = sorted(receipt.shard for receipt in receipts if receipt.failed)
    shards = (read_shard_rows(layout, shard, columns).to_pylist() for shard in failed_shards)
    failed = (f"{row['uri']} ({row['reason']})" for rows in shards for row in rows if row["status"] == FAILED)
    return ", ".join(itertools.islice(failed, _NAMED_FAILURES))
