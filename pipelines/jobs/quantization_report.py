"""Measures the token errors and the ranking changes of each precision of an index.

No labels are needed: each precision is compared with a reference precision. Nothing is written to the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipelines.jobs.quantize import precision_to_read
from pipelines.progress.events import OnEvent, Progress
from storage_formats.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edje_index.evaluation.quantization_report.rankings import RankingChange
    from edje_index.evaluation.quantization_report.token_errors import TokenErrors
    from edje_index.search.search_model import SearchModel
    from storage_formats.codecs import Blocks
    from storage_formats.format.layout import IndexSpec
    from storage_formats.format.manifest import CommittedIndex

    ReadBlocks: TypeAlias = Callable[[NDArray[np.int64]], Blocks]
    Subject: TypeAlias = Callable[[NDArray[np.int64], Blocks], Blocks]  # (row ids, reference blocks) -> blocks

_BATCH_TOKENS = 8192  # tokens compared at once: 100 MB of float64 at a width of 384


@dataclass(frozen=True)
class ReportConfig:
    """A request to compare precisions with a reference.

    Attributes:
        root: directory of the index.
        precisions: the precisions to measure; empty for all.
        source: the reference precision; None for the highest-fidelity precision stored.
        rows: number of random rows whose tokens are compared.
        queries: file of queries; None for `GENERIC_CAPTIONS`.
        pool: number of candidates per query.
        model: bundle to re-rank with; None for the bundle that built the index.
        device: "auto", "cpu" or "cuda".
        seed: seed for sampling the rows.
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
    """The sample of rows whose tokens were compared.

    Attributes:
        rows: number of sampled rows, holes included.
        holes: number of sampled rows without tokens. These rows were skipped.
        seed: seed for sampling the rows.
    """

    rows: int
    holes: int
    seed: int


@dataclass(frozen=True)
class QueriesUsed:
    """The queries whose candidates were re-ranked.

    Attributes:
        source: path of the file, or "built-in captions".
        count: number of queries.
        pool: number of candidates per query.
        trained: False for a model of random weights.
    """

    source: str
    count: int
    pool: int
    trained: bool


@dataclass(frozen=True)
class PrecisionCost:
    """One precision, compared with the reference.

    Attributes:
        name: name of the precision.
        stored: True if the index stores the precision, False if the tokens were converted in memory for this report.
        bytes_per_image: length of a record in bytes.
        tokens: errors of the tokens; None if there were no tokens to compare.
        ranking: changes of the ranking; None if re-ranking was not measured.
    """

    name: str
    stored: bool
    bytes_per_image: int
    tokens: TokenErrors | None
    ranking: RankingChange | None


@dataclass(frozen=True)
class QuantizeReport:
    """Comparison of the precisions of an index with a reference precision.

    Attributes:
        index: path of the index.
        rows: number of rows of the index.
        block_shape: (m, d), the shape of one image's tokens.
        reference: the precision that all other precisions are compared with.
        reference_encoded_from: precisions that the reference was converted from, first to last.
        reference_bytes_per_image: length of a record of the reference in bytes.
        sample: the rows that were compared.
        queries: the queries whose candidates were re-ranked; None if re-ranking was not measured.
        ranking_left_out: why re-ranking was not measured; None if it was measured.
        impossible: reason why a precision cannot encode tokens of this width, by name of the precision.
        precisions: the measured precisions, longest records first.
    """

    index: str
    rows: int
    block_shape: tuple[int, int]
    reference: str
    reference_encoded_from: tuple[str, ...]
    reference_bytes_per_image: int
    sample: Sample
    queries: QueriesUsed | None
    ranking_left_out: str | None
    impossible: dict[str, str]
    precisions: tuple[PrecisionCost, ...]


def measure_precisions(config: ReportConfig, on_event: OnEvent = lambda _: None) -> QuantizeReport:
    """Compare every precision of `config` with the reference.

    Raises:
        UsageError: there is no index, a precision is unknown, the index does not store the reference precision, or the
            file of queries is invalid.
        ModelError: the bundle cannot be used, or another bundle built the index.
        CorruptIndexError: tokens are missing.
    """
    from storage_formats.codecs import codec
    from storage_formats.format.manifest import CommittedIndex

    queries, query_source = _queries(config)
    index = CommittedIndex.open(config.root)
    manifest, spec = index.manifest, index.manifest.spec
    reference = precision_to_read(config.root, manifest, config.source)
    subjects, impossible = _subjects(config, spec, reference)
    read = _reader(config.root, reference)
    sample, errors = _token_errors(config, spec, read, subjects, on_event)
    model, left_out = _ranking_model(config, index)
    rankings: dict[str, RankingChange] = {}
    if model is not None:
        rankings = _rankings(config, index, model, read, subjects, queries, on_event)
        left_out = None if rankings else "no query has two candidates"
    sizes = {name: codec(name, spec.block_shape).record_bytes for name in (reference, *subjects)}
    costs = [
        PrecisionCost(name, name in spec.precisions, sizes[name], errors[name], rankings.get(name))
        for name in sorted(subjects, key=lambda name: -sizes[name])
    ]
    used = None
    if rankings and model is not None:
        used = QueriesUsed(query_source, len(queries), config.pool, model.trained)
    return QuantizeReport(
        index=str(config.root),
        rows=spec.rows,
        block_shape=spec.block_shape,
        reference=reference,
        reference_encoded_from=manifest.encoded_from.get(reference, ()),
        reference_bytes_per_image=sizes[reference],
        sample=sample,
        queries=used,
        ranking_left_out=left_out,
        impossible=impossible,
        precisions=tuple(costs),
    )


def _queries(config: ReportConfig) -> tuple[list[str], str]:
    """Return the queries and their source: the path of the file, or "built-in captions"."""
    from edje_index.evaluation.quantization_report.queries import GENERIC_CAPTIONS, read_queries

    if config.queries is None:
        return list(GENERIC_CAPTIONS), "built-in captions"
    return read_queries(config.queries), str(config.queries)


def _subjects(config: ReportConfig, spec: IndexSpec, reference: str) -> tuple[dict[str, Subject], dict[str, str]]:
    """Return two mappings by precision: a function that returns the blocks, or the reason why there are no blocks."""
    from storage_formats.codecs import codec, precisions

    subjects: dict[str, Subject] = {}
    impossible: dict[str, str] = {}
    for name in dict.fromkeys(config.precisions or precisions()):
        if name == reference:
            continue
        try:
            entry = codec(name, spec.block_shape)
        except UsageError as error:
            if config.precisions:
                raise
            impossible[name] = str(error)
            continue
        if name in spec.precisions:
            read = _reader(config.root, name)
            subjects[name] = lambda rows, _, read=read: read(rows)  # type: ignore[misc]
        else:
            subjects[name] = lambda _, blocks, entry=entry: entry.decode(entry.encode(blocks))  # type: ignore[misc]
    return subjects, impossible


def _reader(root: Path, precision: str) -> ReadBlocks:
    from storage_formats.token_store import TokenStore

    return TokenStore.open(root, precision).fetch


def _token_errors(
    config: ReportConfig, spec: IndexSpec, read: ReadBlocks, subjects: dict[str, Subject], on_event: OnEvent
) -> tuple[Sample, dict[str, TokenErrors | None]]:
    """Sample rows. Return the sample and the token errors of each precision."""
    import numpy as np

    from edje_index.evaluation.quantization_report.token_errors import TokenErrorMeter
    from storage_formats.format.manifest import CommittedIndex
    from storage_formats.format.tombstones import live_rows

    rows_in_index = live_rows(CommittedIndex.open(config.root))
    count = min(config.rows, len(rows_in_index))
    sampled = np.sort(np.random.default_rng(config.seed).choice(rows_in_index, count, replace=False))
    meters = {name: TokenErrorMeter() for name in subjects}
    holes = done = 0
    for rows in _batches(sampled, max(1, _BATCH_TOKENS // spec.block_shape[0])):
        on_event(Progress("comparing tokens, rows", done, count))
        blocks = read(rows)
        is_block = ~np.isnan(blocks[:, 0, 0].astype(np.float32))
        holes += int((~is_block).sum())
        done += len(rows)
        for name, subject in subjects.items():
            meters[name].add(blocks[is_block], subject(rows[is_block], blocks[is_block]))
    return Sample(count, holes, config.seed), {name: meter.result() for name, meter in meters.items()}


def _batches(rows: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _ranking_model(config: ReportConfig, index: CommittedIndex) -> tuple[SearchModel | None, str | None]:
    """Return (model, None), or (None, reason) if no model can re-rank."""
    if config.model is None:
        bundle = index.manifest.model.get("bundle")
        if bundle is None:
            return None, "the index was not built by a model"
        if not Path(bundle).exists():
            return None, f"the model bundle {bundle} no longer exists; give the current path of the bundle"
    from edje_index.search.search_model import SearchModel

    model = SearchModel.of_index(index, config.model, device=config.device)
    if model.adapter_config.is_feature:
        return None, "the index stores features to train on, which the joint encoder cannot score"
    width = index.manifest.spec.block_shape[1]
    if model.joint.width != width:
        return None, f"the joint encoder reads tokens of width {model.joint.width}, but the index stores width {width}"
    return model, None


def _rankings(
    config: ReportConfig,
    index: CommittedIndex,
    model: SearchModel,
    read: ReadBlocks,
    subjects: dict[str, Subject],
    queries: list[str],
    on_event: OnEvent,
) -> dict[str, RankingChange]:
    """Re-rank the candidates of each query at every precision. Return the ranking changes by precision."""
    from edje_index.evaluation.quantization_report.query_candidates import query_candidates
    from edje_index.evaluation.quantization_report.rankings import compare_rankings
    from edje_index.search.reranking import Reranker

    reranker = Reranker(index, model)
    reference: list[NDArray[np.float32]] = []
    scores: dict[str, list[NDArray[np.float32]]] = {name: [] for name in subjects}
    activity = f"re-ranking at {len(subjects) + 1} precisions, queries"
    for done, (query, candidates) in enumerate(query_candidates(config.root, model, queries, config.pool)):
        on_event(Progress(activity, done, len(queries)))
        if len(candidates.rows) < 2:
            continue
        blocks = read(candidates.rows)
        reference.append(reranker.scores([query], [candidates], blocks)[0].final)
        for name, subject in subjects.items():
            changed = subject(candidates.rows, blocks)
            scores[name].append(reranker.scores([query], [candidates], changed)[0].final)
    return {name: compare_rankings(reference, others) for name, others in scores.items() if reference}
