"""Makes bundles with random weights, with which all commands can be tried without a
trained model.

All commands take as long as with trained weights of the same sizes, but the order of
search results has no meaning.
"""

from __future__ import annotations

import re
import string
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from edje_index.bundles.bundle import ModelBundle
from edje_index.bundles.info import BundleInfo
from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.adapter import AdapterConfig, build_adapter
from edje_index.models.clip_config import ClipConfig
from edje_index.models.clip_model import build_clip
from edje_index.models.devices import Float32Modules, plain_torch
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.joint_inputs import (
    IMAGE_TOKEN,
    SPECIAL_TOKEN_NAMES,
    JointTokenizer,
)
from edje_index.models.text_tower import text_tokenizer
from edje_index.models.vision_tower import vision_tower

prepare_torchvision()

from open_clip.tokenizer import SimpleTokenizer  # noqa: E402
from open_clip.transform import PreprocessCfg  # noqa: E402

NOTES = "untrained: random weights; scores and the order of results have no meaning"
# special tokens, in the order of `SPECIAL_TOKEN_NAMES`
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# suffix of an entry in open_clip's vocabulary, if a word ends with this entry
WORD_END = "</w>"


@dataclass(frozen=True)
class UntrainedSizes:
    """Sizes of the models in an untrained bundle.

    The defaults are the sizes of ViT-S/16 (vision tower) and MiniLM-L6-H384 (language
    model). A block has 64 tokens of width 384.
    """

    # `adapter_hidden` is 8192 in the EDJE paper. With this size, the adapter would be
    # nearly as slow as this small vision tower.
    image_size: int = 224
    patch_size: int = 16
    vision_width: int = 384
    vision_layers: int = 12
    vision_head_width: int = 64
    embed_dim: int = 384
    text_width: int = 192
    text_layers: int = 4
    tokens: int = 64
    adapter_kind: str = "compressed"
    adapter_hidden: int = 1536
    language_width: int = 384
    language_layers: int = 6
    language_heads: int = 12
    language_words: int = 16000


TINY = UntrainedSizes(
    image_size=32,
    patch_size=8,
    vision_width=32,
    vision_layers=2,
    vision_head_width=16,
    embed_dim=24,
    text_width=16,
    text_layers=1,
    tokens=4,
    adapter_hidden=48,
    language_width=16,
    language_layers=1,
    language_heads=2,
    language_words=500,
)
"""Sizes for tests. A block has 4 tokens of width 16, an embedding has the width 24, and
an image has 32 x 32 pixels.
"""


@plain_torch()
def create_untrained_bundle(
    out: str | Path, *, seed: int = 0, sizes: UntrainedSizes | None = None
) -> BundleInfo:
    """Write a bundle with random weights to the new directory ``out``. Equal seeds and
    sizes give equal bytes.

    Raises:
        ModelError: ``out`` exists.

    Examples:
        >>> from edje_index import create_untrained_bundle
        >>> from edje_index.bundles.random_bundle import TINY
        >>> create_untrained_bundle("tiny", sizes=TINY).block_shape
        (4, 16)
    """
    sizes = sizes or UntrainedSizes()
    vision_config = {
        "image_size": sizes.image_size,
        "patch_size": sizes.patch_size,
        "width": sizes.vision_width,
        "layers": sizes.vision_layers,
        "head_width": sizes.vision_head_width,
    }
    text_config = {
        "context_length": 77,
        "vocab_size": 49408,
        "width": sizes.text_width,
        "heads": max(1, sizes.text_width // 64),
        "layers": sizes.text_layers,
    }
    clip_config = ClipConfig(
        f"untrained-ViT-{sizes.vision_width}x{sizes.vision_layers}-{sizes.patch_size}",
        {
            "embed_dim": sizes.embed_dim,
            "vision_cfg": vision_config,
            "text_cfg": text_config,
        },
        asdict(PreprocessCfg(size=(sizes.image_size, sizes.image_size))),
    )
    with Float32Modules(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip = build_clip(clip_config)
        vision = vision_tower(clip.visual, sizes.embed_dim)
        adapter = AdapterConfig(
            kind=sizes.adapter_kind,
            num_tokens=(
                vision.num_patches if sizes.adapter_kind == "local" else sizes.tokens
            ),
            vision_dim=vision.patch_dim,
            language_dim=sizes.language_width,
            hidden_dim=sizes.adapter_hidden,
            num_heads=vision.num_heads,
            layer_norm_eps=vision.layer_norm_eps,
        )
        bundle = ModelBundle(
            clip=clip,
            clip_config=clip_config,
            text_tokenizer=text_tokenizer(clip_config),
            adapter=build_adapter(adapter),
            joint=untrained_joint_encoder(
                sizes.embed_dim,
                words=sizes.language_words,
                width=sizes.language_width,
                layers=sizes.language_layers,
                heads=sizes.language_heads,
                intermediate=4 * sizes.language_width,
            ),
            trained=False,
            notes=NOTES,
        )
    return bundle.save(out)


def untrained_joint_encoder(
    embed_dim: int,
    *,
    words: int,
    width: int,
    intermediate: int,
    layers: int = 1,
    heads: int = 1,
    positions: int = 512,
) -> JointEncoder:
    """Make a joint encoder with random weights and a tokenizer from
    `untrained_tokenizer`.
    """
    tokenizer = untrained_tokenizer(words)
    config = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
    }
    return JointEncoder(bert_config(config), tokenizer, embed_dim)


def untrained_tokenizer(words: int) -> JointTokenizer:
    """Make a WordPiece tokenizer with ``words`` entries from the vocabulary of
    open_clip, without a download.

    Special tokens, punctuation, single letters and digits are added to these entries.
    The last entry is ``<image>``.
    """
    # In the vocabulary of open_clip, an entry that ends a word ends with ``</w>``. It
    # becomes a whole word. All other entries become pieces that continue a word
    # (``##``). Single letters and digits are added, so that the tokenizer can split
    # every word of lower-case ASCII letters.
    letters = string.ascii_lowercase + string.digits
    pieces = [*SPECIAL, *string.punctuation, *letters, *("##" + c for c in letters)]
    most = len(pieces) + words
    for entry in SimpleTokenizer().encoder:
        word = entry.removesuffix(WORD_END)
        if re.fullmatch(r"[a-z0-9]+", word):
            pieces.append(word if entry.endswith(WORD_END) else "##" + word)
    pieces = list(dict.fromkeys(pieces))[:most]
    vocabulary = {
        piece: token_id for token_id, piece in enumerate((*pieces, IMAGE_TOKEN))
    }
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return JointTokenizer(
        tokenizer, dict(zip(SPECIAL_TOKEN_NAMES, SPECIAL, strict=True))
    )
