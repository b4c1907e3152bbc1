"""Makes bundles from models that are not bundles: checkpoints of the published EDJE
training code, and towers without an adapter.

The bundle of a published checkpoint has the adapter and the joint encoder of the
checkpoint. The frozen towers come from the checkpoint itself, or from the repository
that the configuration of the checkpoint names.

SigLIP and SigLIP 2 towers in the format of transformers become open_clip models, whose
outputs equal those of ``SiglipModel`` of transformers up to rounding. All sizes come
from the files ``config.json`` and ``preprocessor_config.json``. For values that these
files leave out, the defaults of transformers are used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BundleInfo
from edje_index.bundles.random_bundle import untrained_joint_encoder
from edje_index.bundles.repositories import (
    Say,
    Source,
    all_files,
    open_source,
    silent,
    text_files,
)
from edje_index.errors import ModelError
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.adapter import (
    COMPRESSED,
    LOCAL,
    STRIDED,
    Adapter,
    AdapterConfig,
    build_adapter,
)
from edje_index.models.clip_config import CONFIG_FILE, ClipConfig
from edje_index.models.clip_model import LOCAL_DIR, build_clip, load_clip
from edje_index.models.devices import plain_torch
from edje_index.models.filesystem import check_new
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.safety import read_configuration
from edje_index.models.text_tower import text_tokenizer
from edje_index.models.vision_tower import vision_tower
from edje_index.models.weights import (
    State,
    assign_weights,
    check_finite,
    limited_by,
    read_weights_files,
)
from edje_index.scoring.weights import DirectionWeights, ScoreWeights
from storage_formats.atomic import Json
from storage_formats.remote.urls import IndexLocation, hub_kind

prepare_torchvision()

import timm  # noqa: E402
from transformers import SiglipConfig  # noqa: E402

# Key of a configuration -> the repository of the EDJE authors' model. It is used for
# checkpoints without this key.
_REPOSITORIES = {
    "siglip_path": "google/siglip2-large-patch16-384",
    "language_model_path": "microsoft/MiniLM-L12-H384-uncased",
}
# prefixes of the names of the tensors of a published model
ADAPTER_PREFIX = "vision_projection."
JOINT_PREFIXES = (
    "language_model.",
    "classification_head.",
    "text_projection.",
    "text_embeddings.",
)
_LAST_PART = "classification_head.1.weight"
WORDS = "language_model.bert.embeddings.word_embeddings.weight"
POSITIONS = "language_model.bert.embeddings.position_embeddings.weight"
# Groups of names that stand for the same tensor. Some files contain the tensor under
# only one name of its group.
_TIED = (
    (WORDS, "text_embeddings.weight", "language_model.cls.predictions.decoder.weight"),
    (
        "language_model.cls.predictions.bias",
        "language_model.cls.predictions.decoder.bias",
    ),
)
# The default pool. The evaluation of the paper uses 10 to 50 candidates per query.
_POOL = 50
# A larger value of `k` in a configuration is not taken for a pool.
_MAX_POOL = 1000


# Name of the activation in transformers -> argument `approximate` of nn.GELU
_ACTIVATIONS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}
# PIL's number of the bicubic filter, which is the default of transformers
_BICUBIC = 3
# PIL's number of a resampling filter -> open_clip's name of this filter
_FILTERS = {2: "bilinear", _BICUBIC: "bicubic"}
# Each pair is a pattern in the names of weights in transformers, and its replacement in
# open_clip.
_VISION_NAMES = (
    (r"embeddings\.patch_embedding", "patch_embed.proj"),
    (r"embeddings\.position_embedding\.weight", "pos_embed"),
    (r"encoder\.layers", "blocks"),
    (r"\.layer_norm(\d)", r".norm\1"),
    (r"self_attn\.out_proj", "attn.proj"),
    (r"self_attn\.qkv", "attn.qkv"),
    (r"post_layernorm", "norm"),
    (r"head\.probe", "attn_pool.latent"),
    (r"head\.attention\.out_proj", "attn_pool.proj"),
    (r"head\.layernorm", "attn_pool.norm"),
    (r"head\.", "attn_pool."),
)
_TEXT_NAMES = (
    (r"embeddings\.token_embedding", "token_embedding"),
    (r"embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"encoder\.layers", "transformer.resblocks"),
    (r"\.layer_norm(\d)", r".ln_\1"),
    (r"self_attn\.out_proj", "attn.out_proj"),
    (r"self_attn\.qkv\.", "attn.in_proj_"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
    (r"final_layer_norm", "ln_final"),
    (r"^head", "text_projection"),
)
# for each tower, the prefix of its weights in transformers and in open_clip
_TOWERS = (
    ("vision_model.", "visual.trunk.", _VISION_NAMES),
    ("text_model.", "text.", _TEXT_NAMES),
)


@dataclass(frozen=True)
class PublishedModel:
    """The adapter and the joint encoder of a published checkpoint.

    Attributes:
        adapter: maps patch features [b, n, d_v] to tokens [b, m, d].
        joint: joint encoder. The published evaluation code converts captions to lower
            case without punctuation before it calls the model. To do the same, apply
            `edje_index.models.joint_inputs.clean_canonicalize` to captions.

    Examples:
        >>> from edje_index import load_published_checkpoint
        >>> model = load_published_checkpoint(
        ...     "checkpoint.pth", "tokenizer", vision_heads=2
        ... )
        >>> model.joint.width
        16
    """

    adapter: Adapter
    joint: JointEncoder

    def score(self, captions: str | Sequence[str], tokens: Tensor) -> Tensor:
        """Return the logits of the captions and images, float32 [b]. The higher the
        logit, the better the caption describes the image.

        Args:
            captions: b captions, or one caption for all images.
            tokens: tokens from the adapter [b, m, d].
        """
        return self.joint.score(captions, tokens)


@dataclass
class _Checkpoint:
    """A published checkpoint: its weights, and the settings that the weights do not
    contain.

    Attributes:
        source: location of the files.
        files: paths of the weights files.
        state: weights by their published names.
        config: content of ``config.json`` and the settings of the training run.
    """

    source: Source
    files: list[Path]
    state: State
    config: Json

    def towers(self) -> State:
        """Return the weights of the SigLIP towers in the checkpoint by their names in
        transformers. A tower that is not complete is left out.

        A checkpoint contains the vision tower twice, as ``vision_encoder.*`` and as
        ``clip.vision_model.*``, because the training code saves both. If the two
        differ, ModelError is raised.
        """
        towers = {
            key.removeprefix("clip."): tensor
            for key, tensor in self.state.items()
            if key.startswith(("clip.vision_model.", "clip.text_model."))
        }
        for key, tensor in self.state.items():
            if not key.startswith("vision_encoder."):
                continue
            name = key.removeprefix("vision_encoder.").removeprefix("vision_model.")
            of_clip = towers.setdefault(f"vision_model.{name}", tensor)
            if not torch.equal(of_clip, tensor):
                raise ModelError(
                    f"{self.source.label} has two vision towers, clip.* and"
                    f" vision_encoder.*, which differ in {name}, but a bundle has one:"
                    " give a checkpoint with frozen towers"
                )
        complete = towers_in(towers)
        return {k: v for k, v in towers.items() if k.partition(".")[0] in complete}

    def repository(self, key: str) -> str:
        """Return the URL of the repository that the entry `key` of the configuration
        names, or else of the one that the authors' model uses.
        """
        # The entry may be a path on the machine of the training run. Its last two parts
        # are then taken as the name.
        name = re.search(r"[\w.-]+/[\w.-]+$", str(self.config.get(key) or ""))
        return f"hf://{name[0] if name else _REPOSITORIES[key]}"


@plain_torch()
def load_published_checkpoint(
    checkpoint: str | Path,
    tokenizer_dir: str | Path | None = None,
    *,
    vision_heads: int | None = None,
    layer_norm_eps: float | None = None,
) -> PublishedModel:
    """Load the adapter and the joint encoder of a published checkpoint. No code in the
    files runs.

    Args:
        checkpoint: file or directory with the weights, or ``hf://ORG/REPO[@REVISION]``.
            The weights are a checkpoint of the published training code, a
            ``pytorch_model.bin``, or safetensors files. Their tensors have the
            published names, or the published names after a common prefix.
        tokenizer_dir: directory with the tokenizer and the ``config.json`` of the joint
            encoder. The default is the directory ``tokenizer/`` beside the weights.
            Without such a directory, it is the directory of the weights if this one
            contains a tokenizer, and otherwise the language model that the checkpoint
            names.
        vision_heads: number of attention heads of the vision tower. A compressed
            adapter has the same number. The default is the number in the configuration
            of the vision tower that the checkpoint names.
        layer_norm_eps: epsilon of the layer norms of the vision tower. A compressed
            adapter has the same epsilon. The default is 1e-6 if `vision_heads` is
            given, and otherwise the epsilon in the configuration of the vision tower.

    Raises:
        HubUnreachableError: a file is missing and cannot be downloaded.
        ModelError: the weights are not those of the published training code, their
            parts do not fit each other, a weight is NaN or infinite, or the tokenizer
            cannot be read.

    Examples:
        >>> import torch
        >>> from edje_index import load_published_checkpoint
        >>> model = load_published_checkpoint(
        ...     "checkpoint.pth", "tokenizer", vision_heads=2
        ... )
        >>> # 16 patches of a tower of width 32
        >>> tokens = model.adapter(torch.zeros(1, 16, 32))
        >>> tokens.shape, model.score("a red car", tokens).shape
        (torch.Size([1, 6, 16]), torch.Size([1]))
    """
    read = read_published(open_source(checkpoint))
    eps = 1e-6 if layer_norm_eps is None else layer_norm_eps
    if vision_heads is None:
        towers = open_source(read.repository("siglip_path"), text_files)
        siglip = read_siglip(towers.config())
        vision: Any = siglip.vision_config
        vision_heads = int(vision.num_attention_heads)
        if layer_norm_eps is None:
            eps = float(vision.layer_norm_eps)
    language = _language(read, tokenizer_dir, silent)
    return _published_model(read, language, vision_heads, eps)


def read_published(source: Source) -> _Checkpoint:
    """Read the weights and the settings of a published model from its files.

    Raises:
        ModelError: the files are not a model of the published training code.
    """
    files = source.weights()
    state, settings = read_weights_files(files)
    prefixes = {
        key.removesuffix(_LAST_PART) for key in state if key.endswith(_LAST_PART)
    }
    prefix = min(prefixes, key=len, default="")
    named = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
    for names in _TIED:
        present = [name for name in names if name in named]
        if present:
            named |= dict.fromkeys(names, named[present[0]])
    missing = [
        name
        for name in (ADAPTER_PREFIX, *JOINT_PREFIXES, WORDS, POSITIONS)
        if not any(key.startswith(name) for key in named)
    ]
    if missing:
        # Only the first of the repeated layers is named.
        tensors = [
            f"{name} {list(tensor.shape)}"
            for name, tensor in state.items()
            if not re.search(r"\.[1-9]\d*\.", name)
        ]
        # The message describes the files, so that the user can report them.
        raise ModelError(
            f"{source.label} is not a model of the published training code in a known"
            " layout. If it is an EDJE model, please report it: open an issue about"
            " edje-index with the lines below\n"
            f"files: {', '.join(sorted(source.names)[:40])}\n"
            f"missing: {', '.join(missing)}\n"
            f"{len(state)} tensors, such as {', '.join(tensors[:100])}"
        )
    return _Checkpoint(source, files, named, {**source.config(), **settings})


def _published_model(
    read: _Checkpoint,
    language: tuple[Path, Path | Json],
    heads: int,
    eps: float,
) -> PublishedModel:
    """Build the adapter and the joint encoder of a checkpoint.

    Args:
        language: result of `_language`.
        heads: number of attention heads of the vision tower.
        eps: epsilon of the layer norms of the vision tower.
    """
    state = read.state
    label = read.source.label
    folder, bert = language
    with limited_by(*read.files):
        # Training adds the token <image>, and may extend the position table.
        # config.json may still have the sizes before training, so the sizes are taken
        # from the weights.
        config = bert_config(
            bert,
            vocab_size=state[WORDS].shape[0],
            max_position_embeddings=state[POSITIONS].shape[0],
        )
        joint = JointEncoder(
            config,
            load_joint_tokenizer(folder),
            _need(label, state, "text_projection.weight").shape[0],
        )
        # Older versions of transformers also stored the position ids 0, 1, 2, ... The
        # joint encoder here does not store them.
        kept = {
            k: v
            for k, v in state.items()
            if k.startswith(JOINT_PREFIXES) and not k.endswith(".position_ids")
        }
        assign_weights(joint, kept, f"the joint encoder of {label}")
        activation = str(joint.config.hidden_act)
        weights = {
            k.removeprefix(ADAPTER_PREFIX): v
            for k, v in state.items()
            if k.startswith(ADAPTER_PREFIX)
        }
        if "query" in weights:
            adapter_config = AdapterConfig(
                kind=COMPRESSED,
                num_tokens=weights["query"].shape[1],
                vision_dim=weights["query"].shape[2],
                language_dim=_need(label, weights, "projection.weight").shape[0],
                hidden_dim=_need(label, weights, "mlp.fc1.weight").shape[0],
                num_heads=heads,
                activation=activation,
                layer_norm_eps=eps,
            )
        else:
            hidden, width = _need(label, weights, "0.weight").shape
            # A local adapter makes one token per patch. The checkpoint does not record
            # the number of patches, so 1 stands for it until `import_checkpoint` sets
            # the number.
            adapter_config = AdapterConfig(
                LOCAL,
                1,
                width,
                _need(label, weights, "2.weight").shape[0],
                hidden,
                activation=activation,
            )
        adapter = build_adapter(adapter_config)
        assign_weights(adapter, weights, f"the adapter of {label}")
    if adapter.config.language_dim != joint.width:
        raise ModelError(
            f"the adapter in {label} makes tokens of width"
            f" {adapter.config.language_dim}, but the joint encoder reads tokens of"
            f" width {joint.width}; give another checkpoint"
        )
    check_finite(joint.state_dict(), f"the joint encoder of {label}")
    check_finite(adapter.state_dict(), f"the adapter of {label}")
    return PublishedModel(adapter.requires_grad_(False), joint)


def _need(label: str, weights: State, name: str) -> Tensor:
    if name not in weights:
        raise ModelError(
            f"{label} is not a checkpoint of the published training code: it lacks the"
            f" weights {name}; give another checkpoint"
        )
    return weights[name]


def _language(
    read: _Checkpoint, tokenizer_dir: str | Path | None, say: Say
) -> tuple[Path, Path | Json]:
    """Return (directory with the tokenizer of the joint encoder, BERT configuration of
    the joint encoder). The configuration is the path of a JSON file or its content.
    """
    source = read.source
    beside = source.folder / "tokenizer"
    tokenizer: Path | None = None
    if tokenizer_dir is not None:
        tokenizer = Path(tokenizer_dir)
    elif beside.is_dir():
        tokenizer = beside
    elif {"tokenizer.json", "vocab.txt"} & set(source.names):
        tokenizer = source.folder
    # The configuration of the whole model may contain that of the language model.
    configs = [source.config(), *source.config().values()]
    bert: Path | Json | None = next((each for each in configs if _is_bert(each)), None)
    if tokenizer is not None:
        file = tokenizer / "config.json"
        if tokenizer_dir is not None or (
            file.is_file() and _is_bert(read_configuration(file))
        ):
            bert = file
    if tokenizer is None or bert is None:
        language = open_source(read.repository("language_model_path"), text_files, say)
        tokenizer = tokenizer or language.folder
        bert = bert or language.config()
    return tokenizer, bert


def _is_bert(config: Any) -> bool:
    return isinstance(config, dict) and config.get("model_type") == "bert"


def load_towers(
    vision: str | Source, checkpoint: _Checkpoint | None = None, say: Say = silent
) -> tuple[nn.Module, ClipConfig, Path | None]:
    """Load the vision and the text tower.

    Args:
        vision: name of a model for `load_clip`; or a directory or ``hf://ORG/REPO``
            that contains towers of open_clip or SigLIP towers of transformers.
        checkpoint: a checkpoint whose SigLIP towers replace those of `vision`. If the
            checkpoint has both towers, `vision` needs no weights.
        say: receives a line before a download.

    Returns:
        The open_clip model, its configuration, and the directory with its tokenizer.
        The directory is None if open_clip finds the tokenizer itself.
    """
    inside = {} if checkpoint is None else checkpoint.towers()
    location: str | Path | Source = vision
    if isinstance(vision, str) and hub_kind(vision) is None:
        location = Path(vision.removeprefix(LOCAL_DIR))
    if isinstance(location, Path) and not location.is_dir():
        clip, config = load_clip(str(vision))
        folder = None
    else:
        is_complete = {"vision_model", "text_model"} <= towers_in(inside)
        source = open_source(location, text_files if is_complete else all_files, say)
        folder = source.folder
        if CONFIG_FILE in source.names:
            clip, config = load_clip(f"{LOCAL_DIR}{folder}")
        else:
            config = siglip_config(
                source.config(),
                source.config("preprocessor_config.json"),
                source.label.partition("@")[0],
            )
            if is_complete and checkpoint is not None:
                with limited_by(*checkpoint.files):
                    clip = build_clip(config)
            else:
                files = source.weights()
                with limited_by(*files):
                    clip = build_clip(config)
                load_siglip(clip, read_weights_files(files)[0], source.label)
    if checkpoint is not None and inside:
        load_siglip(clip, inside, checkpoint.source.label)
    return clip.eval(), config, folder


@plain_torch()
def import_checkpoint(
    checkpoint: IndexLocation | Source,
    vision: str | None,
    out: str | Path,
    *,
    tokenizer_dir: str | Path | None = None,
    text_tokenizer_dir: str | Path | None = None,
    say: Say = silent,
) -> BundleInfo:
    """Make a bundle from a published checkpoint and the towers that it was trained
    with.

    The final score of the bundle is the logit alone, as in the published code. If the
    checkpoint names a SigLIP2 tower, images are resized with a bilinear filter, as in
    the published code. SigLIP towers in the weights of the checkpoint replace those of
    `vision`, because training may have changed them.

    Args:
        checkpoint: as for `load_published_checkpoint`.
        vision: the towers. ``NAME``, ``NAME:TAG``, ``NAME:/path/to/weights``,
            ``hf-hub:ORG/REPO`` and ``local-dir:DIRECTORY`` name a model of open_clip. A
            directory or ``hf://ORG/REPO`` contains towers of open_clip or SigLIP towers
            of transformers. None selects the repository that the configuration of the
            checkpoint names, else the towers of the EDJE authors' model.
        out: new directory for the bundle.
        tokenizer_dir: as for `load_published_checkpoint`.
        text_tokenizer_dir: directory with the tokenizer of the text tower. This
            argument is needed only for a Hugging Face tokenizer that is not beside the
            towers and cannot be downloaded.
        say: receives a line before each download.

    Raises:
        HubUnreachableError: weights or a tokenizer are missing and cannot be
            downloaded.
        ModelError: a file is missing, or the parts do not fit each other.

    Examples:
        >>> from edje_index import import_checkpoint
        >>> info = import_checkpoint(
        ...     "checkpoint.pth", "local-dir:model/vision", "imported"
        ... )
        >>> info.block_shape, info.trained
        ((6, 16), True)
    """
    check_new(out)
    read = read_published(open_source(checkpoint, say=say))
    recorded = str(read.config.get("siglip_path"))
    is_given = vision is not None
    vision = vision or read.repository("siglip_path")
    language = _language(read, tokenizer_dir, say)
    clip, config, folder = load_towers(vision, read, say)
    tower = vision_tower(clip.visual, config.embed_dim)
    published = _published_model(read, language, tower.num_heads, tower.layer_norm_eps)
    adapter = published.adapter
    sizes = re.search(r"patch(\d{1,3})-(\d{1,4})$", recorded)
    # The recorded name contains the sizes of the tower, such as "patch16-384". They are
    # compared only with towers that the caller chose, because the repository that the
    # checkpoint names may have other sizes than its name says.
    if (
        is_given
        and sizes
        and (patches := (int(sizes[2]) // max(1, int(sizes[1]))) ** 2)
        != tower.num_patches
    ):
        raise ModelError(
            f"the checkpoint was trained with {recorded}, which has {patches} patches,"
            f" but {vision} has {tower.num_patches} patches: give the tower that the"
            " checkpoint was trained with"
        )
    if recorded.startswith("google/siglip2-"):
        # The published code resizes the images of these towers with transformers, which
        # uses a bilinear filter. open_clip would use another filter.
        config = replace(
            config, preprocess={**config.preprocess, "interpolation": "bilinear"}
        )
    # The checkpoint does not record the number of patches, which is the number of
    # tokens of a local adapter.
    if adapter.config.kind == LOCAL:
        adapter.config = replace(adapter.config, num_tokens=tower.num_patches)
    published.joint.tokenizer.canonical = True
    pool = read.config.get("k")
    if not isinstance(pool, int) or not 0 < pool <= _MAX_POOL:
        pool = _POOL
    bundle = ModelBundle(
        clip=clip,
        clip_config=config,
        text_tokenizer=text_tokenizer(config, text_tokenizer_dir or folder),
        adapter=adapter,
        joint=published.joint,
        trained=True,
        notes=f"imported from {read.source.label}, tower {vision}",
        pool=pool,
    )
    return bundle.save(out)


def bundle_of_towers(
    vision: str | Source, out: str | Path, *, say: Say = silent
) -> BundleInfo:
    """Make a bundle from a vision and a text tower alone. The final score of the bundle
    is the embedding similarity.

    Every bundle has an adapter and a joint encoder. The adapter of this bundle stores
    one patch per image, and searches do not use its joint encoder.

    Arguments and errors are as in `import_checkpoint`.
    """
    check_new(out)
    clip, config, folder = load_towers(vision, say=say)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tower = vision_tower(clip.visual, config.embed_dim)
        joint = untrained_joint_encoder(
            tower.embed_dim, words=8, width=8, intermediate=8, positions=80
        )
    by_embedding = ScoreWeights(logit=0.0, embedding=1.0)
    bundle = ModelBundle(
        clip=clip,
        clip_config=config,
        text_tokenizer=text_tokenizer(config, folder),
        adapter=build_adapter(
            AdapterConfig(STRIDED, 1, tower.patch_dim, tower.patch_dim, hidden_dim=0)
        ),
        joint=joint,
        trained=True,
        notes=f"towers {config.name}; searches by embedding alone",
        score=DirectionWeights(by_embedding, by_embedding),
    )
    return bundle.save(out)


def siglip_config(config: Json, processor: Json, name: str) -> ClipConfig:
    """Return the open_clip configuration of SigLIP towers.

    Args:
        config: content of ``config.json``.
        processor: content of ``preprocessor_config.json``.
        name: name of the model. Its tokenizer has the same name.

    Raises:
        ModelError: the configuration is not valid, or open_clip or timm has no tower
            with these sizes.
    """
    siglip = read_siglip(config)
    try:
        vision: Any = siglip.vision_config
        text: Any = siglip.text_config
        activations = [_ACTIVATIONS[each.hidden_act] for each in (vision, text)]
        resize = _FILTERS[int(processor.get("resample", _BICUBIC))]
        size = int(vision.image_size)
        model = {
            "embed_dim": int(text.projection_size),
            "init_logit_bias": -10,
            "custom_text": True,
            "vision_cfg": {
                "image_size": size,
                "timm_model_name": _timm_name(vision),
                "timm_model_pretrained": False,
                "timm_pool": "map",
                "timm_proj": "none",
                "act_kwargs": {"approximate": activations[0]},
            },
            "text_cfg": {
                "context_length": int(text.max_position_embeddings),
                "vocab_size": int(text.vocab_size),
                "hf_tokenizer_name": name,
                "tokenizer_kwargs": {"clean": "canonicalize"},
                "width": int(text.hidden_size),
                "heads": int(text.num_attention_heads),
                "layers": int(text.num_hidden_layers),
                "mlp_ratio": text.intermediate_size / text.hidden_size,
                "no_causal_mask": True,
                "proj_bias": True,
                "pool_type": "last",
                "norm_kwargs": {"eps": float(text.layer_norm_eps)},
                "act_kwargs": {"approximate": activations[1]},
            },
        }
        preprocess = {
            "size": [size, size],
            "mean": list(processor.get("image_mean", [0.5] * 3)),
            "std": list(processor.get("image_std", [0.5] * 3)),
            "interpolation": resize,
            "resize_mode": "squash",
        }
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the configuration of {name} describes towers that this version does not"
            f" support: {error!r:.300}; give SigLIP or SigLIP 2 towers of a fixed image"
            " size"
        ) from error
    return ClipConfig(name.rpartition("/")[2], model, preprocess)


def load_siglip(clip: nn.Module, state: State, source: str) -> None:
    """Copy the weights `state` of a ``SiglipModel`` of transformers into the open_clip
    model `clip`. A tower without weights in `state` does not change.

    Raises:
        ModelError: a tensor is missing, or has another size.
    """
    for prefix, target, names in _TOWERS:
        tower = {
            key.removeprefix(prefix): tensor
            for key, tensor in state.items()
            if key.startswith(prefix) and not key.endswith(".position_ids")
        }
        if not tower:
            continue
        module = clip.get_submodule(target.removesuffix("."))
        expected = module.state_dict()
        weights = _open_clip_weights(tower, names)
        for name, tensor in weights.items():
            # Position tables have one more axis in timm than in transformers.
            if name in expected and tensor.numel() == expected[name].numel():
                weights[name] = tensor.reshape(expected[name].shape)
        assign_weights(module, weights, f"the tower {prefix}* of {source}")


def towers_in(state: State) -> set[str]:
    """Return the names of the towers that `state` has weights of: "vision_model",
    "text_model", both or neither.
    """
    return {
        name
        for name in ("vision_model", "text_model")
        if f"{name}.encoder.layers.0.mlp.fc1.weight" in state
    }


def read_siglip(config: Json) -> SiglipConfig:
    """Return the configuration of the towers that `config` describes. `config` is the
    content of ``config.json``.

    Raises:
        ModelError: `config` does not describe SigLIP towers.
    """
    try:
        if config.get("model_type") != "siglip":
            raise ValueError(f"model_type is {config.get('model_type')!r}")
        # The method `from_dict` is not used, because it warns about token ids of the
        # default configuration.
        return SiglipConfig(**config)
    except Exception as error:
        # The checks of transformers raise exceptions of several libraries, so all
        # exceptions are caught.
        raise ModelError(
            f"config.json describes no SigLIP towers: {error!s:.300}; give towers of"
            " open_clip, or SigLIP or SigLIP 2 towers of a fixed image size"
        ) from error


def _timm_name(vision: Any) -> str:
    """Return the name that timm gives to a vision tower with the sizes in `vision`.

    Raises:
        ModelError: timm has no such tower.
    """
    pattern = f"vit_*_patch{vision.patch_size}_siglip_{vision.image_size}"
    sizes = (
        vision.hidden_size,
        vision.num_hidden_layers,
        vision.num_attention_heads,
        vision.intermediate_size,
        vision.layer_norm_eps,
    )
    for name in timm.list_models(pattern):
        with torch.device("meta"):
            trunk: Any = timm.create_model(name, num_classes=0)
        first = trunk.blocks[0]
        if sizes == (
            trunk.num_features,
            len(trunk.blocks),
            first.attn.num_heads,
            first.mlp.fc1.out_features,
            trunk.norm.eps,
        ):
            return str(name)
    raise ModelError(
        f"timm has no SigLIP tower {pattern} with the width, layers, heads, hidden"
        f" width and epsilon {sizes}: upgrade timm, or convert the towers to open_clip"
    )


def _open_clip_weights(tower: State, renames: tuple[tuple[str, str], ...]) -> State:
    """Return the weights of a tower with the names of open_clip.

    open_clip joins the weights of query, key and value in one tensor. In the pooling
    head, it separates the weights of the query, which transformers joins with the
    others.
    """
    result = {}
    for key, tensor in tower.items():
        parts = {key: tensor}
        if match := re.fullmatch(r"(.*self_attn\.)([qkv])_proj\.(weight|bias)", key):
            # The weights of key and value are joined to those of the query.
            if match[2] != "q":
                continue
            joined = [
                tower.get(f"{match[1]}{part}_proj.{match[3]}", tensor) for part in "qkv"
            ]
            parts = {f"{match[1]}qkv.{match[3]}": torch.cat(joined)}
        elif match := re.fullmatch(r"(head\.)attention\.in_proj_(weight|bias)", key):
            width = len(tensor) // 3
            parts = {
                f"{match[1]}q.{match[2]}": tensor[:width],
                f"{match[1]}kv.{match[2]}": tensor[width:],
            }
        for name, value in parts.items():
            for pattern, replacement in renames:
                name = re.sub(pattern, replacement, name)
            result[name] = value
    return result
