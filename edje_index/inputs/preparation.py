"""Prepares inputs for the model: reads, hashes, decodes and resizes them.

The processes of `edje_index.inputs.helpers` call this module, so it does not import
torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edje_index.images.decode import ImageError, content_hash
from edje_index.images.frames import DecodeSettings, decode_input
from edje_index.images.preprocessing import Preprocessor
from edje_index.inputs.refs import InputRef, read_bytes
from storage_formats.format.rows import FAILED

Pixels: TypeAlias = NDArray[np.uint8]
Columns: TypeAlias = dict[str, Any]
"""Columns of the rows table that preparation knows, by name. An input that cannot be
prepared has the status "failed", a reason and a detail.
"""
Job: TypeAlias = tuple[int, InputRef]
"""An input, and the position at which its pixels belong."""
Prepare: TypeAlias = Callable[[Iterable[Job]], list[Columns]]
"""Function that prepares inputs and returns the columns of each."""


def failed(reason: str, detail: str) -> Columns:
    """Return the columns of an input that cannot be prepared."""
    return {"status": FAILED, "reason": reason, "detail": detail}


@dataclass(frozen=True)
class Preparation:
    """How inputs are prepared.

    Attributes:
        decoding: settings of decoding.
        preprocess: resizes and crops the decoded images. None only reads and hashes
            the inputs.
    """

    decoding: DecodeSettings = field(default_factory=DecodeSettings)
    preprocess: Preprocessor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pixels of an input: (3, height, width), or for clips (frames, 3,
        height, width).
        """
        if self.preprocess is None:
            return (0,)
        frames = self.decoding.frames
        return (
            self.preprocess.shape
            if frames is None
            else (frames, *self.preprocess.shape)
        )

    def run(self, ref: InputRef, out: Pixels) -> Columns:
        """Prepare one input, write its pixels to `out`, and return its columns.

        Raises:
            TransientInputError: the input cannot be read or decoded because of a
                problem of the machine.
        """
        columns: Columns = {}
        started = time.perf_counter()
        try:
            data = read_bytes(ref)
            columns["size"] = len(data)
            columns["content_hash"] = content_hash(data)
            if ref.content_hash not in (None, columns["content_hash"]):
                raise ImageError(
                    reason="changed-since-plan",
                    detail="the file has changed since the build was planned",
                )
            columns["read_seconds"] = time.perf_counter() - started
            if self.preprocess is not None:
                started = time.perf_counter()
                columns |= self._decode(data, ref.uri, self.preprocess, out)
                columns["decode_seconds"] = time.perf_counter() - started
        except ImageError as error:
            columns |= failed(error.reason, error.detail)
        return columns

    def run_all(self, pixels: Pixels, jobs: Iterable[Job]) -> list[Columns]:
        """Prepare inputs, and write their pixels to their positions in `pixels`."""
        return [self.run(ref, pixels[position]) for position, ref in jobs]

    def _decode(
        self, data: bytes, uri: str, preprocess: Preprocessor, out: Pixels
    ) -> Columns:
        is_clip = self.decoding.frames is not None
        target = None if is_clip else out
        size, frames, truncation = decode_input(
            data, uri, self.decoding, lambda image: preprocess.array(image, target)
        )
        if is_clip:
            np.stack(frames, out=out)
        return {"width": size[0], "height": size[1], "detail": truncation}
