"""A source that is a caption file in JSON: COCO captions, a Karpathy split, or a list of records."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edje_index.captions.formats import read_records
from edje_index.captions.record import ID_KEY, SPLIT_KEY, CaptionRecord
from edje_index.images.inputs import InputRef, display_path
from pipelines.sources.file_source import FileSource
from pipelines.sources.listed import listed_input
from pipelines.sources.metadata import CAPTIONS, source_values

CAPTION_SUFFIX = ".json"


@dataclass
class CaptionFileSource(FileSource):
    """The images of a caption file, in file order, with their captions, splits and identifiers as metadata.

    Relative paths start at the directory of the file. If several records name one image, their captions are joined.
    A record without a usable path gives an input with the problem "bad-list-line".

    Raises:
        UsageError: `iter_inputs` cannot read the file, or a record is malformed.
    """

    kind: str = "captions"

    def iter_inputs(self) -> Iterator[InputRef]:
        self.ignored.clear()
        directory = os.path.dirname(self.path)
        for number, record in enumerate(self._records(), 1):
            ref = listed_input(record.image, directory)
            ref = ref or InputRef(f"{display_path(self.path)}#{number}", self.path, problem="bad-list-line")
            values = {CAPTIONS: list(record.captions) or None, SPLIT_KEY: record.split, ID_KEY: record.image_id}
            yield dataclasses.replace(ref, metadata=source_values(values, self.ignored))

    def _records(self) -> list[CaptionRecord]:
        """Return one record per image."""
        record_of_image: dict[str, CaptionRecord] = {}
        for record in read_records(Path(os.fsdecode(self.path))):
            first = record_of_image.setdefault(record.image, record)
            if first is not record:
                joined = dataclasses.replace(first, captions=(*first.captions, *record.captions))
                record_of_image[record.image] = joined
        return list(record_of_image.values())
