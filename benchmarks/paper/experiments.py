"""The experiments of `bench paper`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.paper import ablations, costs, main_tables
from benchmarks.paper.study import Study
from benchmarks.paper.tables import Table

EXPERIMENTS: Mapping[str, Callable[[Study], Table]] = {
    "prior-art": main_tables.prior_art,
    "zero-shot": main_tables.zero_shot,
    "tokens": main_tables.tokens,
    "pool-size": main_tables.pool_size,
    "objectives": ablations.objectives,
    "distillation": ablations.distillation,
    "adapters": ablations.adapters,
    "language-model": ablations.language_model,
    "mining": ablations.mining,
    "quantization": ablations.quantization,
    "alignment": ablations.alignment,
    "full-dataset": main_tables.full_dataset,
    "io-test": costs.io_test,
    "time-breakdown": costs.time_breakdown,
}
"""Functions by name of the experiment. A function runs the missing steps and returns the table.

The docstring of the function describes the table.
"""
