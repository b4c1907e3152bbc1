"""The task of encoding one shard, and the interface of the image encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from edje_index.images.decoded_input import DecodeSettings
from edje_index.images.input_lists import read_shard_inputs
from edje_index.images.inputs import InputRef
from storage_formats.format.layout import IndexSpec, Layout
from storage_formats.format.source_columns import SourceColumn

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from storage_formats.codecs import Blocks


class Encoder(Protocol):
    """Interface of an image encoder, as far as `encode_shard` uses it."""

    def preprocess(self, image: Image) -> torch.Tensor:
        """Convert an RGB image to float32 [3, h, w]. Several threads call this method at the same time."""
        ...

    def encode(self, pixels: torch.Tensor) -> tuple[Blocks, NDArray[np.float32]]:
        """Convert `pixels` [b, 3, h, w] to tokens, bfloat16 [b, m, d], and embeddings, float32 [b, embed_dim].

        The pixels of clips have a further axis for the frames, [b, f, 3, h, w].
        """
        ...


@dataclass(frozen=True)
class ShardTask:
    """One shard to encode. The task and the encoder determine the contents of the shard.

    Attributes:
        root: directory of the index.
        shard: shard number.
        spec: shape of the index.
        plan: fingerprint of the build plan.
        batch_size: number of images, or of frames of clips, per forward pass.
        decoding: settings of decoding.
        decode_threads: number of threads that read and decode images. This number does not affect the result.
        columns: source columns of the rows table.
    """

    root: str
    shard: int
    spec: IndexSpec
    plan: str
    batch_size: int
    decoding: DecodeSettings
    decode_threads: int
    columns: tuple[SourceColumn, ...] = ()

    @property
    def layout(self) -> Layout:
        """Layout of the index."""
        return Layout(Path(self.root))

    def refs(self) -> Sequence[InputRef]:
        """Return the inputs of the shard, in row order.

        Raises:
            CorruptIndexError, OSError: see `read_shard_inputs`.
        """
        return read_shard_inputs(self.layout, self.spec, self.shard)

    @property
    def inputs_per_batch(self) -> int:
        """Number of inputs per forward pass."""
        return inputs_per_batch(self.batch_size, self.decoding.frames)


def inputs_per_batch(batch_size: int, frames: int | None) -> int:
    """Return the inputs per forward pass. An input with more frames than `batch_size` gets a pass of its own."""
    return max(1, batch_size // (frames or 1))
