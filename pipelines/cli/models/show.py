"""The command `edje-index model show`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.options import PATH, json_option
from pipelines.cli.output import print_json, print_line
from pipelines.progress.wording import human_bytes

if TYPE_CHECKING:
    from edje_index.bundles.info import BundleInfo


@click.command()
@click.argument("bundle", type=PATH)
@json_option
def show(bundle: Path, as_json: bool) -> None:
    """Show what the model bundle BUNDLE contains.

    The output has two fingerprints. The bundle fingerprint covers the whole bundle. The encoder fingerprint covers the
    vision tower and the adapter. A bundle can search an index only if both have the same encoder fingerprint.

    \b
    Examples:
      edje-index model show model
      edje-index model show model --json
    """
    from edje_index.bundles.info import read_bundle_info

    info = read_bundle_info(bundle)
    if as_json:
        print_json(_record(info))
        return
    for name, text in _lines(info):
        print_line(f"{name:<21}{text}")


def _record(info: BundleInfo) -> dict[str, Any]:
    return {
        "bundle": str(info.path),
        "vision": info.vision_name,
        "image_size": list(info.vision["image_size"]),
        "block_shape": list(info.block_shape),
        "frames": info.frames,
        "embed_dim": info.embed_dim,
        "trained": info.trained,
        "canonical_captions": info.canonical_captions,
        "bytes": sum(int(file["bytes"]) for file in info.files.values()),
        "fingerprint": info.fingerprint,
        "encoder_fingerprint": info.encoder_fingerprint,
        "score": {"t2i": info.score.t2i.described(), "i2t": info.score.i2t.described()},
        "notes": info.notes,
    }


def _lines(info: BundleInfo) -> list[tuple[str, str]]:
    record = _record(info)
    height, width = record["image_size"]
    m, d = record["block_shape"]
    return [
        ("bundle", record["bundle"]),
        ("vision tower", f"{record['vision']}, images of {width} x {height} pixels"),
        ("tokens", f"{m} x {d} per image"),
        *([("frames per clip", str(info.frames))] if info.frames else []),
        ("captions", "canonicalised" if info.canonical_captions else "as given"),
        ("embedding", f"{record['embed_dim']} dimensions"),
        ("weights", human_bytes(info.weights_bytes) + ("" if info.trained else ", untrained (random)")),
        ("text-to-image score", record["score"]["t2i"]),
        ("image-to-text score", record["score"]["i2t"]),
        ("fingerprint", f"{info.fingerprint} (the whole bundle)"),
        ("encoder fingerprint", f"{info.encoder_fingerprint} (image tower and adapter)"),
        *([("notes", info.notes)] if info.notes else []),
    ]
