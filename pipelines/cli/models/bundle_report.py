"""Prints a summary of a new bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.cli.output import print_json, print_line

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo


def report_bundle(info: BundleInfo, *, as_json: bool) -> None:
    """Print a summary of a new bundle, as text or JSON."""
    if as_json:
        print_json(
            {
                "bundle": str(info.path),
                "vision": info.vision_name,
                "fingerprint": info.fingerprint,
                "trained": info.trained,
            }
        )
        return
    m, d = info.block_shape
    print_line(f"{info.path}: {info.vision_name}, {m} x {d} tokens per image{'' if info.trained else ', untrained'}")
