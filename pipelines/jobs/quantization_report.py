"""What each precision costs on an index, without labels: errors of tokens, and the change of re-ranking.

Nothing is written to the index. Precisions that it holds are read; others are encoded in memory from the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipelines.jobs.quantize import precision_to_read
from pipelines.progress.events import OnEvent, StatusMessage
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edje_index.evaluation.quantization_report.rankings import RankingChange
    from edje_index.evaluation.quantization_report.reranking import Reranker
    from edje_index.evaluation.quantization_report.token_errors import TokenErrors
    from storage_formats.codecs import Blocks
    from storage_formats.format.layout import IndexSpec
    from storage_formats.format.manifest import Manifest

    Subject: TypeAlias = Callable[[NDArray[np.int64], Blocks], Blocks]

_BATCH_TOKENS = 8192  # compared at once: some 100 MB of float64 at a width of 384


@dataclass(frozen=True)
class ReportConfig:
    """A request.

    Attributes:
        root: the index.
        precisions: what to measure; every one that is known where it is empty.
        source: the reference; None takes the stored one of the longest records.
        rows: how many rows to compare tokens of, drawn with `seed`.
        queries: file of texts; None takes `GENERIC_CAPTIONS`.
        pool: candidates of a query.
        model: bundle; None takes the one that built the index, if it is there.
        device: where the model runs.
        seed: of the sample of rows.
    """

    root: Path
    precisions: tuple[str, ...] = ()
    source: str | None = None
    rows: int = 2000
    queries: Path | None = None
    pool: int = 50
    model: Path | None = None
    device: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """Rows whose tokens were compared; `holes` were drawn too and hold none."""

    rows: int
    holes: int
    seed: int


@dataclass(frozen=True)
class QueriesUsed:
    """Texts that were ranked for: a file or "built-in captions"; `trained` is False for a model of random weights."""

    source: str
    count: int
    pool: int
    trained: bool


@dataclass(frozen=True)
class PrecisionCost:
    """A precision beside the reference; `stored` is False where it was encoded in memory for this report."""

    name: str
    stored: bool
    bytes_per_image: int
    tokens: TokenErrors | None
    ranking: RankingChange | None


@dataclass(frozen=True)
class QuantizeReport:
    """What was measured.

    Attributes:
        index, rows, block_shape: of the index.
        reference: precision that all others are compared with.
        reference_bytes_per_image: of its records.
        sample: rows compared.
        queries: texts ranked for; None where re-ranking was left out.
        ranking_left_out: why it was.
        impossible: precisions that the width of the tokens does not allow, and why.
        precisions: the others, longest records first.
    """

    index: str
    rows: int
    block_shape: tuple[int, int]
    reference: str
    reference_bytes_per_image: int
    sample: Sample
    queries: QueriesUsed | None
    ranking_left_out: str | None
    impossible: dict[str, str]
    precisions: tuple[PrecisionCost, ...]


def measure_precisions(config: ReportConfig, on_event: OnEvent = lambda _: None) -> QuantizeReport:
    """Compare every precision of `config` with the reference.

    Raises:
        UsageError: no index, an unknown precision, a reference that it does not hold, unusable queries.
        ModelError: the bundle that was named did not build the index.
        CorruptIndexError: tokens are missing.
    """
    from storage_formats.codecs import codec
    from storage_formats.format.manifest import Manifest

    texts, source = _queries(config)
    manifest = Manifest.load(config.root)
    reference = precision_to_read(config.root, manifest.spec, config.source)
    subjects, impossible = _subjects(config, manifest.spec, reference)
    read = _stored(config.root, reference)
    sample, errors = _token_errors(config, manifest.spec, read, subjects, on_event)
    reranker, left_out = _reranker(config, manifest)
    rankings: dict[str, RankingChange] = {}
    if reranker is not None:
        rankings = _rankings(reranker, read, subjects, texts, config.pool, on_event)
        left_out = left_out or (None if rankings else "no query has two candidates")
    sizes = {name: codec(name, manifest.spec.block_shape).record_bytes for name in (reference, *subjects)}
    costs = [
        PrecisionCost(name, name in manifest.spec.precisions, sizes[name], errors[name], rankings.get(name))
        for name in sorted(subjects, key=lambda name: -sizes[name])
    ]
    trained = bool(manifest.model.get("trained", True)) if config.model is None else _is_trained(config.model)
    return QuantizeReport(
        index=str(config.root),
        rows=manifest.spec.rows,
        block_shape=manifest.spec.block_shape,
        reference=reference,
        reference_bytes_per_image=sizes[reference],
        sample=sample,
        queries=QueriesUsed(source, len(texts), config.pool, trained) if rankings else None,
        ranking_left_out=left_out,
        impossible=impossible,
        precisions=tuple(costs),
    )


def _queries(config: ReportConfig) -> tuple[list[str], str]:
    """(texts, where they are from)."""
    from edje_index.evaluation.quantization_report.queries import GENERIC_CAPTIONS, read_queries

    if config.queries is None:
        return list(GENERIC_CAPTIONS), "built-in captions"
    return read_queries(config.queries), str(config.queries)


def _subjects(config: ReportConfig, spec: IndexSpec, reference: str) -> tuple[dict[str, Subject], dict[str, str]]:
    """(how to come by the blocks of each precision, why others have none)."""
    from storage_formats.codecs import codec, precisions

    subjects: dict[str, Subject] = {}
    impossible: dict[str, str] = {}
    for name in config.precisions or precisions():
        if name == reference or name in subjects:
            continue
        try:
            entry = codec(name, spec.block_shape)
        except UsageError as error:
            if config.precisions:
                raise
            impossible[name] = str(error)
            continue
        if name in spec.precisions:
            read = _stored(config.root, name)
            subjects[name] = lambda rows, _, read=read: read(rows)  # type: ignore[misc]
        else:
            subjects[name] = lambda _, blocks, entry=entry: entry.decode(entry.encode(blocks))  # type: ignore[misc]
    return subjects, impossible


def _stored(root: Path, name: str) -> Callable[[NDArray[np.int64]], Blocks]:
    from storage_formats.token_store import TokenStore

    return TokenStore.open(root, name).fetch


def _token_errors(
    config: ReportConfig,
    spec: IndexSpec,
    read: Callable[[NDArray[np.int64]], Blocks],
    subjects: dict[str, Subject],
    on_event: OnEvent,
) -> tuple[Sample, dict[str, TokenErrors | None]]:
    """Errors of the tokens of a sample of rows, a batch in memory at a time."""
    import numpy as np

    from edje_index.evaluation.quantization_report.token_errors import TokenErrorMeter

    count = min(config.rows, spec.rows)
    on_event(StatusMessage(f"comparing the tokens of {count:,} rows"))
    chosen = np.sort(np.random.default_rng(config.seed).choice(spec.rows, count, replace=False))
    meters = {name: TokenErrorMeter() for name in subjects}
    holes = 0
    for rows in _batches(chosen, max(1, _BATCH_TOKENS // spec.block_shape[0])):
        blocks = read(rows)
        there = ~np.isnan(blocks[:, 0, 0].astype(np.float32))
        holes += int((~there).sum())
        kept, reference = rows[there], blocks[there]
        for name, subject in subjects.items():
            meters[name].add(reference, subject(kept, reference))
    return Sample(count, holes, config.seed), {name: meter.result() for name, meter in meters.items()}


def _batches(rows: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _reranker(config: ReportConfig, manifest: Manifest) -> tuple[Reranker | None, str | None]:
    """(what scores candidates, why there is none)."""
    if config.model is None:
        bundle = manifest.model.get("bundle")
        if bundle is None:
            return None, "the index was not built by a model"
        if not Path(bundle).exists():
            return None, f"the model bundle {bundle} is gone; name its place with --model"
    from edje_index.evaluation.quantization_report.reranking import Reranker
    from edje_index.search.token_index import TokenIndex

    model = TokenIndex.open(config.root, config.model, device=config.device).model
    if model.adapter.config.is_feature:
        return None, "the index stores features to train on, which the joint encoder does not read"
    width = manifest.spec.block_shape[1]
    if model.joint.width != width:
        return None, f"the joint encoder reads tokens of width {model.joint.width}, the index stores {width}"
    return Reranker(config.root, model), None


def _is_trained(bundle: Path) -> bool:
    from edje_index.bundles.info import read_bundle_info

    return read_bundle_info(bundle).trained


def _rankings(
    reranker: Reranker,
    read: Callable[[NDArray[np.int64]], Blocks],
    subjects: dict[str, Subject],
    texts: list[str],
    pool: int,
    on_event: OnEvent,
) -> dict[str, RankingChange]:
    """Change of the scores of the candidates of each text; empty where no text has two candidates."""
    from edje_index.evaluation.quantization_report.rankings import compare_rankings

    reference: list[NDArray[np.float32]] = []
    scores: dict[str, list[NDArray[np.float32]]] = {name: [] for name in subjects}
    for at, candidates in enumerate(reranker.candidates(texts, pool)):
        if at % 4 == 0:
            on_event(StatusMessage(f"re-ranking at {len(subjects) + 1} precisions, query {at + 1} of {len(texts)}"))
        if len(candidates.rows) < 2:
            continue
        blocks = read(candidates.rows)
        reference.append(reranker.scores(candidates, blocks))
        for name, subject in subjects.items():
            scores[name].append(reranker.scores(candidates, subject(candidates.rows, blocks)))
    return {name: compare_rankings(reference, found) for name, found in scores.items() if reference}
