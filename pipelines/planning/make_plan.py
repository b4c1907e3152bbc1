"""Making a build plan, or finding the one that an index was begun with.

A plan is refused early, with numbers. Once it is written, an interrupted build goes on from it: the sources are not
listed again, and no setting may change.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.planning.config import BuildConfig
from pipelines.planning.estimates import Need, ann_memory_need, disk_need, worker_memory_need
from pipelines.planning.machine import available_memory, cuda_devices, free_disk
from pipelines.planning.plan import BuildPlan, BuildSettings, describe_differences, plan_fingerprint, read_plan
from pipelines.progress.events import OnEvent, Progress
from pipelines.progress.stopping import JobStopped, ShouldStop
from pipelines.progress.wording import human_bytes
from storage_formats.cpus import usable_cpus
from storage_formats.errors import UsageError
from storage_formats.format.layout import IndexSpec, Layout

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo
    from edje_index.images.inputs import InputRef
    from pipelines.sources import Source
    from storage_formats.format.manifest import Manifest

_MAX_THREADS = 4  # a small ViT gains little from more; further CPUs serve better as further workers
_REPORT_EVERY = 1000


def plan_build(config: BuildConfig, on_event: OnEvent, should_stop: ShouldStop = lambda: False) -> BuildPlan:
    """The plan that `config.out` was begun with, or a new one, written to `build/`.

    The caller holds the index's lock and has made sure that the index is not finished.

    Raises:
        UsageError: a request that cannot be served, with the numbers.
        ModelError: no sound model bundle.
        JobStopped: `should_stop()` turned true.
    """
    check_out_folder(config)
    info = _bundle_info(config)
    begun = read_plan(config.out)
    if begun is None:
        return _new_plan(config, info, on_event, should_stop)
    asked = _settings(config, begun.settings)
    refuse_differences(config.out, "begun", (begun.model, begun.settings), (_model(info), asked), begun.inputs_digest)
    _check_device(config, asked)
    return replace(begun, model=_model(info))  # the bundle may have moved


def finished_manifest(config: BuildConfig) -> Manifest | None:
    """The manifest of `config.out`; None where there is no finished index."""
    if not Layout(config.out).manifest.exists():
        return None
    from storage_formats.format.manifest import Manifest

    return Manifest.load(config.out)


def check_finished(config: BuildConfig, manifest: Manifest, should_stop: ShouldStop = lambda: False) -> None:
    """Make sure that the finished index is the one that `config` asks for: the same model, settings and inputs.

    Raises:
        UsageError: it is not; the message has the numbers.
    """
    try:
        found = BuildSettings.from_json(manifest.settings)
        digest = str(manifest.settings["inputs_digest"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{config.out} is an index that was not made by 'build'; give another --out") from error
    from pipelines.sources import iter_all

    model = _model(_bundle_info(config))
    asked = _settings(config, found)
    refuse_differences(config.out, "built", (manifest.model, found), (model, asked), digest)
    listing = _Listing(should_stop)
    for _ in listing.watch(iter_all(_open_sources(config))):
        pass
    if plan_fingerprint(model, asked, listing.digest) != manifest.plan:
        raise UsageError(_changed_inputs(config, manifest))


def refuse_differences(
    root: Path,
    done: str,
    found: tuple[dict[str, Any], BuildSettings],
    asked: tuple[dict[str, Any], BuildSettings],
    inputs_digest: str,
) -> None:
    """UsageError when the model or a setting differs from what the index at `root` was begun or built with."""
    if lines := describe_differences(found, asked):
        there, here = (plan_fingerprint(*pair, inputs_digest) for pair in (found, asked))
        raise UsageError(
            f"{root} was {done} with other settings: {'; '.join(lines)} (plan {there} there, {here} asked). "
            "Repeat the settings that are there, or give another --out"
        )


def choose_workers(config: BuildConfig, settings: BuildSettings) -> int | None:
    """Processes that will hold a model; None leaves it to the Ray cluster that is joined."""
    if config.engine == "inline":
        return 1
    if config.workers is not None or config.address is not None:
        return config.workers
    if settings.device == "cuda":
        return max(1, cuda_devices())
    return max(1, usable_cpus() // settings.threads)


def check_out_folder(config: BuildConfig) -> None:
    """UsageError unless `out` is absent, empty, or an index that was begun or finished."""
    out = config.out
    if any(os.path.realpath(source) == os.path.realpath(out) for source in config.sources):
        raise UsageError(f"--out {out} is one of the sources; give a folder of its own")
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"--out {out} exists and is not a folder")
    layout = Layout(out)
    if layout.manifest.exists() or layout.plan.exists():
        return
    # `build` without a plan: an earlier run ended while it listed its sources.
    strangers = {entry.name for entry in out.iterdir()} - {layout.build.name}
    if layout.build.is_dir():
        strangers |= {entry.name for entry in layout.build.iterdir()} - {"lock", layout.inputs(0).parent.name}
    strangers = {name for name in strangers if not name.startswith(f".{layout.plan.name}.")}  # it was being written
    if strangers:
        shown = ", ".join(sorted(strangers)[:3])
        raise UsageError(f"--out {out} is not empty and not an index (it holds {shown}); give another folder")


@dataclass
class _Listing:
    """What is learned about the inputs while they pass by, once and in order."""

    should_stop: ShouldStop
    on_event: OnEvent = lambda _: None
    inputs: int = 0
    duplicates: int = 0
    _hash: Any = field(default_factory=hashlib.sha256)

    @property
    def digest(self) -> str:
        """SHA-256 over the inputs so far: which bytes they are, as far as listing tells."""
        return str(self._hash.hexdigest())

    def watch(self, refs: Iterable[InputRef]) -> Iterator[InputRef]:
        """Pass `refs` through."""
        for ref in refs:
            if self.should_stop():
                raise JobStopped("stopped while listing the sources; nothing was begun")
            self._hash.update(b"%d %a %d\0" % (ref.offset, ref.size, ref.member) + ref.path + b"\0\n")
            self.inputs += 1
            if self.inputs % _REPORT_EVERY == 0:
                self.on_event(Progress("listing the sources", self.inputs))
            yield ref

    def count(self, refs: Iterable[InputRef]) -> Iterator[InputRef]:
        """Pass `refs` through after duplicates were marked."""
        for ref in refs:
            self.duplicates += ref.duplicate_of is not None
            yield ref


def _new_plan(config: BuildConfig, info: BundleInfo, on_event: OnEvent, should_stop: ShouldStop) -> BuildPlan:
    from storage_formats.codecs import codec

    settings = _settings(config, None)
    for name in settings.precisions:
        codec(name, info.block_shape)  # raises for a name that is none
    _check_device(config, settings)
    _check_worker_memory(config, settings, info)
    sources = _open_sources(config)
    listing = _Listing(should_stop, on_event)
    folder = Layout(config.out).inputs(0).parent
    try:
        rows = _freeze_inputs(config, sources, listing)
        ignored = _ignored(sources)
        spec = IndexSpec(rows, settings.shard_size, info.block_shape, info.embed_dim, settings.precisions)
        _check_room(config.out, spec)
        plan = BuildPlan(config.out, spec, _model(info), settings, listing.digest, listing.duplicates, ignored)
        plan.write()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return plan


def _freeze_inputs(config: BuildConfig, sources: list[Source], listing: _Listing) -> int:
    """Write `build/inputs/`, one file a shard, and return the number of rows. UsageError where there is none."""
    from edje_index.images.inputs import write_inputs
    from pipelines.sources import iter_all, mark_duplicates
    from storage_formats.atomic import fsync_paths

    layout = Layout(config.out)
    shutil.rmtree(layout.inputs(0).parent, ignore_errors=True)
    layout.inputs(0).parent.mkdir(parents=True)
    refs: Iterator[InputRef] = listing.watch(iter_all(sources))
    if config.dedupe:
        refs = listing.count(mark_duplicates(refs))
    written = []
    for shard in itertools.count():
        part = list(itertools.islice(refs, config.shard_size))
        if not part:
            break
        write_inputs(layout.inputs(shard), part)
        written.append(layout.inputs(shard))
    if not written:
        raise UsageError(f"nothing to index in {', '.join(config.sources)}{_ignored_words(sources)}")
    fsync_paths([*written, layout.inputs(0).parent])
    return listing.inputs


def _open_sources(config: BuildConfig) -> list[Source]:
    from pipelines.sources import open_sources

    return open_sources(config.sources, config.column)


def _ignored(sources: list[Source]) -> dict[str, int]:
    total: dict[str, int] = {}
    for source in sources:
        for extension, count in source.ignored.items():
            total[extension] = total.get(extension, 0) + count
    return dict(sorted(total.items()))


def _ignored_words(sources: list[Source]) -> str:
    kinds = ", ".join(f"{name} {count}" for name, count in _ignored(sources).items())
    return f": no images among the files found ({kinds})" if kinds else ": no files found"


def _bundle_info(config: BuildConfig) -> BundleInfo:
    from edje_index.bundles.info import read_bundle_info

    return read_bundle_info(config.model)


def _model(info: BundleInfo) -> dict[str, Any]:
    return {
        "fingerprint": info.encoder_fingerprint,
        "bundle": str(info.path.resolve()),
        "vision": info.vision_name,
        "trained": info.trained,
    }


def _settings(config: BuildConfig, begun: BuildSettings | None) -> BuildSettings:
    """The settings asked for; what the machine would decide is taken from `begun` where that is given."""
    from edje_index.images.decode import DEFAULT_MAX_PIXELS
    from edje_index.images.inputs import display_path

    device, dtype, threads = config.device, config.dtype, config.threads
    if device == "auto":
        device = begun.device if begun else "cuda" if cuda_devices() else "cpu"
    if dtype == "auto":
        dtype = begun.dtype if begun else "bfloat16" if device == "cuda" else "float32"
    if threads is None:
        threads = begun.threads if begun else min(usable_cpus(), _MAX_THREADS)
    return BuildSettings(
        sources=tuple(display_path(os.fsencode(os.path.abspath(source))) for source in config.sources),
        column=config.column,
        dedupe=config.dedupe,
        shard_size=config.shard_size,
        precisions=tuple(dict.fromkeys(config.precisions)),
        max_pixels=config.max_pixels or DEFAULT_MAX_PIXELS,
        batch_size=config.batch_size,
        threads=threads,
        device=device,
        dtype=dtype,
    )


def _check_device(config: BuildConfig, settings: BuildSettings) -> None:
    """UsageError when the build needs CUDA and this machine has none; of a joined cluster nothing is known here."""
    if settings.device == "cuda" and config.address is None and not cuda_devices():
        raise UsageError("the build is to run on cuda, and torch sees no CUDA device here; use --device cpu")


def _check_worker_memory(config: BuildConfig, settings: BuildSettings, info: BundleInfo) -> None:
    workers = choose_workers(config, settings)
    if workers is None or config.address is not None:
        return
    weights, (height, width) = info.encoder_weights_bytes, info.vision["image_size"]
    need = worker_memory_need(workers, weights, settings.batch_size, int(height) * int(width))
    _check_memory(need, "use fewer --workers or a smaller --batch-size")


def _check_room(root: Path, spec: IndexSpec) -> None:
    """UsageError where disk or memory will not do."""
    need, free = disk_need(spec), free_disk(root)
    if need.total > free:
        raise UsageError(
            f"the index of {spec.rows} inputs needs {need} of disk, {human_bytes(free)} are free at {root}; "
            "give another --out, or free some"
        )
    _check_memory(ann_memory_need(spec), "split the sources over several indexes")


def _check_memory(need: Need, advice: str) -> None:
    available = available_memory()
    if need.total > available:
        raise UsageError(f"the build needs at least {need} of memory, {human_bytes(available)} are free; {advice}")


def _changed_inputs(config: BuildConfig, manifest: Manifest) -> str:
    """The message for sources that are no longer what the index was built from."""
    from pipelines.sources import iter_all
    from storage_formats.format.rows import read_rows

    before = {row["uri"]: row["size"] for row in read_rows(config.out, columns=["uri", "size"]).to_pylist()}
    now = {ref.uri: ref.size for ref in iter_all(_open_sources(config))}
    new, missing = now.keys() - before.keys(), before.keys() - now.keys()
    changed = sum(now[uri] != before[uri] for uri in now.keys() & before.keys())
    return (
        f"the sources have changed since {config.out} was built: {manifest.spec.rows} inputs then, {len(now)} now "
        f"({len(new)} new, {len(missing)} gone, {changed} of another size); build a new index with another --out"
    )
