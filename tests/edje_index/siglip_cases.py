"""Small SigLIP towers of transformers with random weights, as repositories hold
them.
"""

import json

import torch

from edje_index.models._torchvision_compat import prepare_torchvision

prepare_torchvision()

from timm.models import register_model  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipModel,
)

WIDTH = 64
HEADS = 4
LAYERS = 3
SIZE = 32
WORDS = 90
TOWERS = "google/siglip2-large-patch16-384"


@register_model
def vit_small_patch8_siglip_32(pretrained=False, **settings):
    """The classes of timm's SigLIP at the size of the golden checkpoints."""
    assert not pretrained
    sizes = {
        "img_size": SIZE,
        "patch_size": 8,
        "embed_dim": WIDTH,
        "depth": LAYERS,
        "num_heads": HEADS,
    }
    return VisionTransformer(
        **sizes, class_token=False, global_pool="map", num_classes=0
    )


def siglip_model(seed=0, activation="gelu_pytorch_tanh"):
    """A small SigLIP of transformers with random weights."""
    shared = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH,
        "hidden_act": activation,
    }
    text = {
        "num_hidden_layers": 2,
        "vocab_size": WORDS,
        "max_position_embeddings": 16,
        "projection_size": WIDTH,
    }
    special = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    vision = {"num_hidden_layers": LAYERS, "image_size": SIZE, "patch_size": 8}
    config = SiglipConfig(
        text_config={**shared, **text, **special}, vision_config={**shared, **vision}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SiglipModel(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def write_siglip(folder, model, size=SIZE):
    """Write the towers, their tokenizer and the settings of their image processor."""
    model.save_pretrained(folder)
    write_text_tokenizer(folder)
    processor = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": size, "width": size},
        "resample": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def write_text_tokenizer(folder):
    words = ["<unk>", "<pad>", "<bos>", "<eos>", "a", "dog", "red", "car", "beach"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
    ).save_pretrained(folder)


def files_of(folder):
    """Contents of the files of a folder, as a repository holds them."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
