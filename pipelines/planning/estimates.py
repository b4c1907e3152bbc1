"""What a build will need of disk and memory, told before it begins."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.progress.wording import human_bytes
from storage_formats.format.layout import CRC_BYTES, PAGE_BYTES, IndexSpec, padded_shard_bytes

_SLACK = 1.02  # metadata, and what a file system adds
_FILES_PER_SHARD = 6  # tokens, checksums, embeddings, rows, and while it is built inputs and receipt
_ROW_BYTES = 200  # of the rows table and the frozen inputs together, compressed; paths of some 60 characters
_PROCESS_BYTES = 600 * 2**20  # torch, open_clip and their libraries, loaded
_BATCHES_HELD = 4  # in decoding, ready, and in the model
_CHANNELS = 3
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Need:
    """Bytes needed and what they are for."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in self.parts.items())
        return f"{human_bytes(self.total)} ({parts})"


def disk_need(spec: IndexSpec) -> Need:
    """Bytes of the whole index on disk, 2 % slack included."""
    from storage_formats.codecs import codec

    tokens = sum(_token_bytes(spec, codec(name, spec.block_shape).record_bytes) for name in spec.precisions)
    embeddings = spec.shards * spec.shard_size * spec.embed_dim * _FLOAT32_BYTES
    rows = spec.rows * _ROW_BYTES + spec.shards * _FILES_PER_SHARD * PAGE_BYTES  # files end in a part of a block
    parts = {"tokens": tokens, "embeddings": embeddings, "rows": rows, "ann": _ann_bytes(spec)}
    return Need({name: int(size * _SLACK) for name, size in parts.items()})


def worker_memory_need(workers: int, weights_bytes: int, batch_size: int, image_pixels: int) -> Need:
    """Bytes of memory of the processes that hold a model; a lower bound."""
    pixels = _BATCHES_HELD * batch_size * _CHANNELS * image_pixels * _FLOAT32_BYTES
    names = ("libraries", "weights", "batches")
    return Need(
        {name: workers * size for name, size in zip(names, (_PROCESS_BYTES, weights_bytes, pixels), strict=True)}
    )


def ann_memory_need(spec: IndexSpec) -> Need:
    """Bytes of memory that building `ann/` takes, after the workers have ended."""
    return Need({"vectors": _ann_bytes(spec)})


def _token_bytes(spec: IndexSpec, record_bytes: int) -> int:
    last = len(spec.shard_rows(spec.shards - 1))
    full_shard, last_shard = (
        padded_shard_bytes(rows, spec.shard_size, record_bytes)[1] for rows in (spec.shard_size, last)
    )
    return (spec.shards - 1) * full_shard + last_shard + spec.rows * CRC_BYTES


def _ann_bytes(spec: IndexSpec) -> int:
    return spec.rows * (spec.embed_dim * _FLOAT32_BYTES + 8)  # vectors and 64-bit ids
