"""Reads and checks ``bundle.json``, the description of a model bundle, and finds the
bundle of an index. This module does not import torch.

The files of a bundle are:

    bundle.json                        sizes, score weights, file hashes, fingerprints
    vision/open_clip_config.json       open_clip's model and preprocessing configuration
    vision/open_clip_model.safetensors weights of the vision and text tower
    vision/...                         tokenizer of the text tower, if from Hugging Face
    adapter.safetensors                weights of the adapter
    joint/config.json                  BERT configuration of the joint encoder
    joint/model.safetensors            weights of joint encoder, pooled similarity
    joint/...                          tokenizer of the joint encoder
    offset.safetensors                 offset block of new indexes; may be absent
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edje_index.errors import BundleNotFoundError, ModelError, NotABundleError
from edje_index.models.safety import check_bundle_folder
from edje_index.scoring.weights import DirectionWeights, ScoreWeights
from storage_formats.arguments import as_path, repr_of
from storage_formats.atomic import Json
from storage_formats.errors import cannot_read
from storage_formats.format.index_files import read_index_file, relative_path
from storage_formats.format.offset import Offset, check_offset

if TYPE_CHECKING:
    from storage_formats.format.manifest import CommittedIndex

FORMAT = "edje-model-bundle"
FORMAT_VERSION = 2
READ_VERSIONS = (1, FORMAT_VERSION)
INFO_FILE = "bundle.json"
MAX_INFO_BYTES = 64 << 20
VISION_FOLDER = "vision"
JOINT_FOLDER = "joint"
VISION_CONFIG = "vision/open_clip_config.json"
VISION_WEIGHTS = "vision/open_clip_model.safetensors"
ADAPTER_WEIGHTS = "adapter.safetensors"
JOINT_CONFIG = "joint/config.json"
JOINT_WEIGHTS = "joint/model.safetensors"
OFFSET_FILE = "offset.safetensors"
OFFSET_TENSOR = "offset"
# The files that determine what an index stores. The text tower and the joint encoder
# only affect searches.
ENCODER_FILES = (VISION_CONFIG, VISION_WEIGHTS, ADAPTER_WEIGHTS)
# This number is part of every fingerprint. It is 1 in all format versions. If a bundle
# of version 1 is saved again in version 2, its fingerprint therefore stays the same,
# and an index built with the first bundle accepts the second.
_FINGERPRINT_VERSION = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class BundleInfo:
    """The content of ``bundle.json``.

    Attributes:
        path: directory of the bundle.
        vision: ``name``, ``patch_dim``, ``num_patches``, ``num_heads``, ``embed_dim``
            and ``image_size`` of the vision tower.
        adapter: fields of the adapter's configuration.
        joint: settings of the joint encoder, by name. ``text_embed_dim`` is the width
            of the text-embedding head. ``canonical_captions`` is True if captions are
            converted to lower case without punctuation. ``pooled_similarity`` has the
            sizes of the pooled similarity, if the bundle has one. ``logit_range`` has
            the smallest and the largest logit on the dev captions to which the weights
            of the final score were fitted. For ``bfloat16_recall_change``, see the
            property of this name.
        score: weights of the final score.
        trained: False if the weights are random.
        notes: origin of the weights, as free text.
        pool: default number of candidates of a search; None if the bundle names none.
        files: size (``bytes``) and hash (``sha256``) of every file except
            ``bundle.json``, by relative path.
        fingerprint: SHA-256 of everything that affects tokens, embeddings or scores.
        encoder_fingerprint: SHA-256 of everything that affects the stored tokens and
            embeddings.

    Examples:
        >>> from edje_index import read_bundle_info
        >>> read_bundle_info("model").path
        PosixPath('model')
    """

    path: Path
    vision: Json
    adapter: Json
    joint: Json
    score: DirectionWeights
    trained: bool
    notes: str
    pool: int | None = None
    files: Mapping[str, Json] = field(default_factory=dict)
    fingerprint: str = ""
    encoder_fingerprint: str = ""

    __repr__ = repr_of(
        "path", "vision_name", "block_shape", "embed_dim", "trained", "fingerprint"
    )

    @property
    def vision_name(self) -> str:
        """Name of the open_clip model with both towers."""
        return str(self.vision["name"])

    @property
    def block_shape(self) -> tuple[int, int]:
        """Shape of a block, (m, d): number of tokens and width of a token."""
        return int(self.adapter["num_tokens"]), int(self.adapter["language_dim"])

    @property
    def embed_dim(self) -> int:
        """Width of the embeddings of both towers."""
        return int(self.vision["embed_dim"])

    @property
    def combines_frames(self) -> bool:
        """True if the adapter can combine the frames of clips."""
        return bool(self.adapter["kind"] == "compressed")

    @property
    def canonical_captions(self) -> bool:
        """True if captions are converted to lower case without punctuation before
        the joint encoder reads them.
        """
        return bool(self.joint.get("canonical_captions", False))

    @property
    def pooled_similarity(self) -> dict[str, int] | None:
        """Sizes of the pooled similarity: ``words`` and ``dim``. None if the bundle
        has no pooled similarity.
        """
        value = self.joint.get("pooled_similarity")
        if value is None:
            return None
        sizes = {name: int(value[name]) for name in ("words", "dim")}
        if min(sizes.values()) < 0:
            raise ValueError(f"the sizes {sizes} must not be negative")
        return sizes

    @property
    def logit_range(self) -> tuple[float, float] | None:
        """Smallest and largest logit of the candidates of dev captions; None if no dev
        captions were scored.

        Raises:
            ValueError: the recorded range is not ascending or not finite.
        """
        if (value := self.joint.get("logit_range")) is None:
            return None
        lowest, highest = map(float, value)
        if not -math.inf < lowest <= highest < math.inf:
            raise ValueError(f"the range of the logits {value} is not ascending")
        return lowest, highest

    @property
    def bfloat16_recall_change(self) -> float | None:
        """Largest of the changes of R@1, R@5 and R@10 on dev captions, in percentage
        points, if logits are computed in bfloat16 instead of float32. None if the
        change was not measured.
        """
        value = self.joint.get("bfloat16_recall_change")
        return None if value is None else float(value)

    @property
    def encoder_weights_bytes(self) -> int:
        """Total size of the weights files of the towers and the adapter, in bytes."""
        return sum(
            int(self.files[name]["bytes"]) for name in (VISION_WEIGHTS, ADAPTER_WEIGHTS)
        )

    def to_json(self) -> Json:
        """Return the content of ``bundle.json``."""
        content = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name != "path"
        }
        return {
            **content,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "score": self.score.to_json(),
        }


def describe_bundle(info: BundleInfo) -> BundleInfo:
    """Return `info` with the file hashes and fingerprints of the bundle in the
    directory ``info.path``.
    """
    paths = sorted(
        p for p in info.path.rglob("*") if p.is_file() and p.name != INFO_FILE
    )
    files = {
        path.relative_to(info.path).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
        for path in paths
    }
    info = replace(info, files=files)
    return replace(
        info,
        fingerprint=_stored_fingerprint(info.to_json()),
        encoder_fingerprint=encoder_fingerprint(info.adapter, files),
    )


def read_bundle_info(path: str | Path) -> BundleInfo:
    """Read the file ``bundle.json`` in the directory ``path``.

    Raises:
        ModelError: the directory is not a bundle, its path is not UTF-8, the format
            version is not supported, the directory contains code, or ``bundle.json`` is
            damaged or was edited.

    Examples:
        >>> from edje_index import read_bundle_info
        >>> info = read_bundle_info("model")
        >>> info.block_shape, info.embed_dim, info.trained
        ((4, 16), 24, False)
    """
    folder = Path(path)
    file = folder / INFO_FILE
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"the path of the bundle {folder} is not UTF-8, and the libraries that read"
            " weights and tokenizers accept no other paths: rename the directory"
        ) from error
    try:
        content = json.loads(read_index_file(folder, file, max_bytes=MAX_INFO_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotABundleError(
            f"{folder} is not a model bundle, because there is no file {file}; give"
            " another path"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(str(cannot_read(file, error, "restore it"))) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ModelError(
            f"{file} does not describe a model bundle, because 'format' is not"
            f" {FORMAT!r}"
        )
    if content.get("format_version") not in READ_VERSIONS:
        raise ModelError(
            f"the model bundle {folder} has format version"
            f" {content.get('format_version')}, but this version of edje-index reads"
            f" only {' and '.join(map(str, READ_VERSIONS))}: upgrade edje-index, or"
            " make the bundle again"
        )
    try:
        joint = dict(content["joint"])
        if content["format_version"] == 1:
            joint, score = _joint_and_score_of_version_1(joint)
        else:
            score = DirectionWeights.from_json(content["score"])
        info = BundleInfo(
            path=folder,
            vision=dict(content["vision"]),
            adapter=dict(content["adapter"]),
            joint=joint,
            score=score,
            trained=bool(content["trained"]),
            notes=str(content["notes"]),
            pool=None if content.get("pool") is None else int(content["pool"]),
            files={
                relative_path(name): file for name, file in content["files"].items()
            },
            fingerprint=str(content["fingerprint"]),
            encoder_fingerprint=str(content["encoder_fingerprint"]),
        )
        # These lines only check the values. Invalid values raise an error.
        _ = info.pooled_similarity, info.logit_range, info.bfloat16_recall_change
        _ = [int(file["bytes"]) for file in info.files.values()]
        _ = info.vision_name, info.combines_frames
        height, width = info.vision["image_size"]
        sizes = [
            height,
            width,
            *(info.vision[name] for name in ("patch_dim", "num_patches", "embed_dim")),
            *(info.adapter[name] for name in ("num_tokens", "language_dim")),
            joint["text_embed_dim"],
            1 if info.pool is None else info.pool,
        ]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"the sizes {sizes} must be positive integers")
        fingerprints = (
            _stored_fingerprint(content),
            encoder_fingerprint(info.adapter, info.files),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file} is damaged ({error!r}): restore this file, or make the bundle"
            " again"
        ) from error
    if fingerprints != (info.fingerprint, info.encoder_fingerprint):
        raise ModelError(
            f"{file} was edited after the bundle was made, because its fingerprint does"
            " not match: restore this file, or make the bundle again"
        )
    check_bundle_folder(folder)
    return info


def encoder_fingerprint(adapter: Json, files: Mapping[str, Json]) -> str:
    """Return the SHA-256 of everything that affects the stored tokens and embeddings.
    `adapter` and `files` are the fields of a `BundleInfo`.
    """
    return _fingerprint(adapter, {}, {name: files[name] for name in ENCODER_FILES})


def read_bundle_offset(info: BundleInfo) -> Offset | None:
    """Return the offset block that a bundle gives to new indexes; None if the bundle
    has none. `storage_formats.format.offset` explains offset blocks.

    Raises:
        ModelError: the file is damaged, or does not fit the bundle.
    """
    if OFFSET_FILE not in info.files:
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load

    verify_files(info, [OFFSET_FILE])
    try:
        offset = load((info.path / OFFSET_FILE).read_bytes())[OFFSET_TENSOR]
        check_offset(offset, info.block_shape)
    except (KeyError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{info.path / OFFSET_FILE} does not fit the bundle ({error}): make the"
            " bundle again"
        ) from error
    return offset


def verify_files(info: BundleInfo, names: Iterable[str] | None = None) -> None:
    """Compare the files `names` of a bundle with the hashes in ``bundle.json``. None
    stands for all files.

    Raises:
        ModelError: a file is missing or has changed.
    """
    for name in info.files if names is None else names:
        file = info.path / name
        record = info.files[name]
        if not file.is_file():
            raise ModelError(
                f"the bundle {info.path} lacks {name}: copy the whole bundle directory,"
                " or make the bundle again"
            )
        if file.stat().st_size != record["bytes"] or _sha256(file) != record["sha256"]:
            raise ModelError(
                f"{file} has changed since the bundle was made: copy this file again"
            )


def matching_bundle(
    index: CommittedIndex, model: str | Path | None = None
) -> BundleInfo:
    """Find the bundle that built `index`. Return the content of its ``bundle.json``.

    Args:
        index: the opened index.
        model: directory of the bundle. None means the path that is recorded in the
            index. This path must be absolute, as `build` records it, because a relative
            path could lead to a bundle from another author.

    Raises:
        ModelError: another bundle built the index, or the index was written from arrays
            without a bundle.
        BundleNotFoundError: the recorded path is relative, or does not exist.
    """
    if model is None:
        if "bundle" not in index.manifest.model:
            raise ModelError(
                f"{index.root} was written from arrays and has no text tower: use"
                " edje_index.LateInteractionSearch"
            )
        path = Path(index.manifest.model["bundle"])
        if not path.is_absolute():
            raise BundleNotFoundError(
                f"{index.root} names its model bundle by the relative path"
                f" {str(path)!r}, which is not safe to follow: give the path of the"
                " bundle that built the index"
            )
        if not path.exists():
            raise BundleNotFoundError(
                f"the model bundle {path}, which built {index.root}, no longer exists:"
                " give the current path of this bundle"
            )
    else:
        path = as_path(model, "model")
    info = read_bundle_info(path)
    built_by = index.manifest.model["fingerprint"]
    if info.encoder_fingerprint != built_by:
        raise ModelError(
            f"the bundle {path} did not build {index.root}, because the encoder"
            f" fingerprint of the bundle is {info.encoder_fingerprint} instead of"
            f" {built_by}: give the bundle that built the index, or build a new index"
            " with this bundle",
            remedy="rebuild",
        )
    return info


def _joint_and_score_of_version_1(
    joint: Json,
) -> tuple[Json, DirectionWeights]:
    """Convert the entry ``joint`` of format version 1, which release 0.1 wrote, to the
    entries ``joint`` and ``score``.

    In version 1, ``joint`` also contains the weights of the final score. Its entry
    ``caption_weights`` has the weights for image-to-text search. Without this entry,
    both directions have the same weights. A bundle without a pooled similarity gets the
    weight 0 for this part. A hubness correction is ignored.
    """
    sizes = {"pooled_similarity": joint["pooled"]} if "pooled" in joint else {}
    images = {name: joint.get(f"{name}_weight", 0.0) for name in ("late", "pooled")}
    images["similarity"] = joint.get("embedding_weight", 0.0)
    weights = [
        ScoreWeights(
            late=float(named["late"]),
            pooled=float(named["pooled"]) if "pooled_similarity" in sizes else 0.0,
            embedding=float(named["similarity"]),
        )
        for named in (images, joint.get("caption_weights", images))
    ]
    return {"text_embed_dim": joint["text_embed_dim"], **sizes}, DirectionWeights(
        *weights
    )


def _stored_fingerprint(content: Json) -> str:
    """Return the fingerprint of a bundle. `content` is the content of its
    ``bundle.json``.
    """
    # If the final score is the logit alone, its weights are left out. The fingerprint
    # is then the same as in format version 1.
    score = content.get("score")
    if score and DirectionWeights.from_json(score) == DirectionWeights():
        score = None
    return _fingerprint(content["adapter"], content["joint"], content["files"], score)


def _fingerprint(
    adapter: Json,
    joint: Json,
    files: Mapping[str, Json],
    score: Json | None = None,
) -> str:
    """Return the SHA-256 of the configurations of the adapter and the joint encoder,
    the hashes of the files, and the score weights.
    """
    hashes = {name: record["sha256"] for name, record in files.items()}
    parts = {
        "format_version": _FINGERPRINT_VERSION,
        "adapter": dict(adapter),
        "joint": dict(joint),
        "files": hashes,
    }
    if score is not None:
        parts["score"] = score
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
