"""Compares runtimes for the joint encoder on a CPU: the time per pair, and the agreement of the rankings.

    python -m benchmarks.joint_runtimes INDEX --model BUNDLE --queries captions.txt --threads 1

Runtimes that are not installed (onnxruntime and onnxscript, openvino, torchao) are skipped.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edje_index.bundles.bundle import ModelBundle
from edje_index.models.joint_encoder import JointEncoder
from edje_index.search.token_index import TokenIndex
from pipelines.cli.search_queries import read_queries
from pipelines.environment import environment
from storage_formats.token_store import TokenStore

Run = Callable[[torch.Tensor], torch.Tensor]
_PAIRS = 50  # pairs per forward pass


class PlainNet(nn.Module):
    """The layers of the joint encoder, without embedding lookup: maps embedded inputs [b, t, d] to logits [b].

    All runtimes can convert the modules of this class.
    """

    def __init__(self, joint: JointEncoder, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        joint = copy.deepcopy(joint)
        self.layers = joint.language_model.bert.encoder.layer
        self.pooler, self.output = joint.classification_head[0].dense, joint.classification_head[1]
        self.heads, self.dtype = joint.config.num_attention_heads, dtype
        for layer in self.layers:
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear) and name:
                    module.to(dtype)
        self.requires_grad_(False).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [b] for embedded inputs [b, t, d]."""
        for number, layer in enumerate(self.layers):
            x = self._layer(layer, x, last=number == len(self.layers) - 1)
        logits: torch.Tensor = self.output(torch.tanh(self.pooler(x[:, 0])))  # type: ignore[operator]
        return logits[:, 0]

    def _layer(self, layer: Any, x: torch.Tensor, *, last: bool) -> torch.Tensor:
        attention, low = layer.attention, x.to(self.dtype)
        x = x[:, :1] if last else x
        query = self._split(attention.self.query(x.to(self.dtype)))
        key, value = self._split(attention.self.key(low)), self._split(attention.self.value(low))
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = attention.output.LayerNorm((x + attention.output.dense(attended)).float())
        wide = functional.gelu(layer.intermediate.dense(x.to(self.dtype)))
        result: torch.Tensor = layer.output.LayerNorm((x + layer.output.dense(wide)).float())
        return result

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)


def torch_float32(joint: JointEncoder, threads: int) -> Run:
    """Return a function that runs the joint encoder with torch in float32, without compilation."""
    return PlainNet(joint)


def torch_bfloat16(joint: JointEncoder, threads: int) -> Run:
    """Return a function that runs the joint encoder with torch and bfloat16 matrix products, without compilation."""
    return PlainNet(joint, torch.bfloat16)


def compiled_float32(joint: JointEncoder, threads: int) -> Run:
    """Return a function that runs the joint encoder with `torch.compile` in float32."""
    return torch.compile(PlainNet(joint))


def compiled_bfloat16(joint: JointEncoder, threads: int) -> Run:
    """Return a function that runs the joint encoder with `torch.compile` and bfloat16 matrix products."""
    return torch.compile(PlainNet(joint, torch.bfloat16))


def own(dtype: torch.dtype) -> Callable[[JointEncoder, int], Run]:
    """Return a factory of functions that run the layers of `JointScorer` in `dtype`."""

    def make(joint: JointEncoder, threads: int) -> Run:
        joint = copy.copy(joint)
        joint.compute_dtype = dtype
        scorer = joint.scorer()
        return lambda rows: scorer._head(torch.tanh(scorer._pooler(scorer._bert.first_states(rows, None))))[:, 0]

    return make


def openvino(precision: str) -> Callable[[JointEncoder, int], Run]:
    """Return a factory of functions that run the joint encoder with OpenVINO.

    Args:
        precision: precision of the matrix products, "f32" or "bf16".
    """

    def make(joint: JointEncoder, threads: int) -> Run:
        import openvino as ov

        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        model = ov.convert_model(PlainNet(joint), example_input=torch.zeros(2, 80, joint.width))
        request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
        return lambda rows: torch.from_numpy(request.infer([rows.numpy()])[0].copy())

    return make


def onnx_runtime(*, int8: bool) -> Callable[[JointEncoder, int], Run]:
    """Return a factory of functions that run the joint encoder with ONNX Runtime.

    Args:
        int8: True for int8 weights and activations, False for float32.
    """

    def make(joint: JointEncoder, threads: int) -> Run:
        import onnxruntime as ort
        from onnxruntime.quantization import QuantType, quantize_dynamic

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with tempfile.TemporaryDirectory() as folder:
            path, quantized = Path(folder, "joint.onnx"), Path(folder, "int8.onnx")
            sizes = {0: torch.export.Dim("b"), 1: torch.export.Dim("t")}
            rows = (torch.zeros(2, 80, joint.width),)
            torch.onnx.export(
                PlainNet(joint), rows, str(path), input_names=["rows"], dynamo=True, dynamic_shapes=[sizes]
            )
            if int8:
                quantize_dynamic(path, quantized, weight_type=QuantType.QInt8, per_channel=True)
            session = ort.InferenceSession(
                str(quantized if int8 else path), options, providers=["CPUExecutionProvider"]
            )
        return lambda rows: torch.from_numpy(session.run(None, {"rows": rows.numpy()})[0])

    return make


def torchao_int8(joint: JointEncoder, threads: int) -> Run:
    """Return a function that runs the joint encoder with torchao: compiled, with int8 weights and activations."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    net = PlainNet(joint)
    quantize_(net, Int8DynamicActivationInt8WeightConfig())
    return torch.compile(net)


RUNTIMES: dict[str, tuple[str, Callable[[JointEncoder, int], Run]]] = {
    "torch float32": ("torch", torch_float32),
    "torch bfloat16": ("torch", torch_bfloat16),
    "JointScorer float32": ("torch", own(torch.float32)),
    "JointScorer bfloat16": ("torch", own(torch.bfloat16)),
    "torch.compile float32": ("torch", compiled_float32),
    "torch.compile bfloat16": ("torch", compiled_bfloat16),
    "ONNX Runtime float32": ("onnxruntime", onnx_runtime(int8=False)),
    "ONNX Runtime int8": ("onnxruntime", onnx_runtime(int8=True)),
    "OpenVINO float32": ("openvino", openvino("f32")),
    "OpenVINO bfloat16": ("openvino", openvino("bf16")),
    "torchao int8": ("torchao", torchao_int8),
}
"""Each runtime by name: the required package, and a factory of functions from embedded inputs to logits."""


@torch.inference_mode()
def embedded_rows(joint: JointEncoder, query: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the input of the first layer, float32 [b, t, d], for one query and the blocks of b candidates."""
    inputs = joint.tokenizer.inputs([query] * len(blocks), blocks.shape[1])
    words = joint.text_embeddings(inputs.input_ids)
    is_image = (inputs.input_ids == joint.tokenizer.image_token_id)[:, :, None].expand_as(words)
    words = words.masked_scatter(is_image, blocks.float())
    rows: torch.Tensor = joint.language_model.bert.embeddings(inputs_embeds=words, token_type_ids=inputs.token_type_ids)
    return rows


@dataclass(frozen=True)
class Pools:
    """The inputs of the first layer for each query. They are computed again in each iteration, to save memory."""

    joint: JointEncoder
    store: TokenStore
    row_ids: dict[str, list[int]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for query, row_ids in self.row_ids.items():
            yield embedded_rows(self.joint, query, self.store.fetch(row_ids, as_torch=True))


@torch.inference_mode()
def measure(run: Run, pools: Pools, expected: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return processor and elapsed milliseconds per pair, and the agreement with the logits in `expected`."""
    run(next(iter(pools))[:_PAIRS])
    processor = elapsed = 0.0
    taus, same_first = [], []
    for rows, logits in zip(pools, expected, strict=True):
        before = time.process_time(), time.perf_counter()
        own_logits = torch.cat([run(part) for part in torch.split(rows, _PAIRS)])
        processor += time.process_time() - before[0]
        elapsed += time.perf_counter() - before[1]
        taus.append(kendall_tau(own_logits, logits))
        same_first.append(float(own_logits.argmax() == logits.argmax()))
    thousands = sum(map(len, expected)) / 1e3
    return {
        "cpu_ms_per_pair": processor / thousands,
        "ms_per_pair": elapsed / thousands,
        "mean_tau": statistics.mean(taus),
        "lowest_tau": min(taus),
        "same_first": statistics.mean(same_first),
    }


def kendall_tau(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return Kendall's rank correlation of two vectors without ties."""
    signs = torch.sign(left[:, None] - left) * torch.sign(right[:, None] - right)
    return float(signs.sum() / (len(left) * (len(left) - 1)))


def main() -> None:
    """Measure each runtime, and print one line of results per runtime."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="bundle of the model that built the index")
    parser.add_argument("--queries", type=Path, required=True, help="file with one query per line")
    parser.add_argument("--count", type=int, default=1000, help="number of queries")
    parser.add_argument("--pool", type=int, default=100, help="candidates per query")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--runtime", action="append", choices=list(RUNTIMES), help="runtime to measure; repeatable; default: all"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    joint = ModelBundle.load(options.model).joint
    index = TokenIndex.open(options.index, options.model)
    row_ids = {
        query: [hit.row_id for hit in index.search(query, options.pool, options.pool, rerank=False)]
        for query in read_queries(options.queries)[: options.count]
    }
    pools = Pools(joint, TokenStore.open(options.index, index.precision), row_ids)
    reference = PlainNet(joint)
    with torch.inference_mode():
        expected = [torch.cat([reference(part) for part in torch.split(rows, _PAIRS)]) for rows in pools]
    print(json.dumps(environment()))
    for name in options.runtime or RUNTIMES:
        package, make = RUNTIMES[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name:24} {package} is not installed")
            continue
        figures = measure(make(joint, options.threads), pools, expected)
        print(f"{name:24} " + "  ".join(f"{key} {value:.4f}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
