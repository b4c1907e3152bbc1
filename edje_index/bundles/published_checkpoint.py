"""Reads checkpoints of the published EDJE training code.

To make a bundle, `import_checkpoint` takes the adapter and the joint encoder from the checkpoint, and the frozen towers
from open_clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from edje_index.errors import ModelError
from edje_index.models.adapter import COMPRESSED, LOCAL, Adapter, AdapterConfig, build_adapter
from edje_index.models.joint_encoder import JointEncoder, bert_config
from edje_index.models.joint_inputs import load_joint_tokenizer
from edje_index.models.weights import State, assign_weights, check_finite, limited_by, read_checkpoint

ADAPTER_PREFIX = "vision_projection."
JOINT_PREFIXES = ("language_model.", "text_embeddings.", "classification_head.", "text_projection.")
WORDS = "language_model.bert.embeddings.word_embeddings.weight"
POSITIONS = "language_model.bert.embeddings.position_embeddings.weight"


@dataclass(frozen=True)
class PublishedModel:
    """The adapter and the joint encoder of a published checkpoint.

    Attributes:
        adapter: maps patch features [b, n, d_v] to tokens [b, m, d].
        joint: joint encoder. The published evaluation code converts captions to lower case without punctuation before
            it calls the model. To do the same, apply `edje_index.models.joint_inputs.clean_canonicalize` to captions.

    Example:
        >>> import torch
        >>> from edje_index import load_published_checkpoint
        >>> model = load_published_checkpoint("checkpoint.pth", "tokenizer", vision_heads=2)
        >>> tokens = model.adapter(torch.zeros(1, 16, 32))  # 16 patches of a tower of width 32
        >>> tokens.shape, model.score("a red car", tokens).shape
        (torch.Size([1, 6, 16]), torch.Size([1]))
    """

    adapter: Adapter
    joint: JointEncoder

    def score(self, captions: str | Sequence[str], tokens: torch.Tensor) -> torch.Tensor:
        """Return matching logits, float32 [b].

        Args:
            captions: b captions, or one caption for all images.
            tokens: tokens from the adapter [b, m, d].
        """
        return self.joint.score(captions, tokens)


@dataclass(frozen=True)
class PublishedCheckpoint:
    """The content of a checkpoint of the published training code.

    Attributes:
        path: path of the checkpoint file, for error messages.
        weights: all weights by name.
        siglip_path: Hugging Face name of the vision tower used in training; None if the checkpoint does not name it.
    """

    path: Path
    weights: State
    siglip_path: str | None

    @classmethod
    def read(cls, path: Path) -> PublishedCheckpoint:
        """Read a checkpoint file. No code in the file runs.

        Raises:
            ModelError: the file is not a checkpoint of the published training code.
        """
        content = read_checkpoint(path)
        state, config = content.get("model"), content.get("config")
        if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
            raise ModelError(
                f"{path} is not a checkpoint of the published training code, because it has no 'model' weights; give "
                "another file"
            )
        tower = config.get("siglip_path") if isinstance(config, dict) else None
        return cls(path, state, tower if isinstance(tower, str) else None)

    def model(self, tokenizer_dir: Path, *, vision_heads: int, layer_norm_eps: float) -> PublishedModel:
        """Build the adapter and the joint encoder. Arguments and errors as in `load_published_checkpoint`."""
        state = self.weights
        self._require(state, WORDS, POSITIONS, "text_projection.weight")
        with limited_by(self.path):
            # Training adds the token <image> and may extend the position table. config.json may still have the old
            # sizes, so the sizes are taken from the weights.
            config = bert_config(
                tokenizer_dir / "config.json",
                vocab_size=state[WORDS].shape[0],
                max_position_embeddings=state[POSITIONS].shape[0],
            )
            tokenizer = load_joint_tokenizer(tokenizer_dir)
            joint = JointEncoder(config, tokenizer, state["text_projection.weight"].shape[0])
            # Older versions of transformers stored the position ids 0, 1, 2, ... as well.
            kept = {k: v for k, v in state.items() if k.startswith(JOINT_PREFIXES) and not k.endswith(".position_ids")}
            assign_weights(joint, kept, f"the joint encoder of {self.path}")
            adapter = self._adapter(str(joint.config.hidden_act), vision_heads, layer_norm_eps)
        if adapter.config.language_dim != joint.width:
            raise ModelError(
                f"the adapter in {self.path} makes tokens of width {adapter.config.language_dim}, but the joint "
                f"encoder reads tokens of width {joint.width}; give another checkpoint"
            )
        check_finite(joint.state_dict(), f"the joint encoder of {self.path}")
        check_finite(adapter.state_dict(), f"the adapter of {self.path}")
        return PublishedModel(adapter.requires_grad_(False), joint)

    def _adapter(self, activation: str, heads: int, eps: float) -> Adapter:
        weights = {k.removeprefix(ADAPTER_PREFIX): v for k, v in self.weights.items() if k.startswith(ADAPTER_PREFIX)}
        if "query" in weights:
            self._require(weights, "mlp.fc1.weight", "projection.weight")
            config = AdapterConfig(
                kind=COMPRESSED,
                num_tokens=weights["query"].shape[1],
                vision_dim=weights["query"].shape[2],
                language_dim=weights["projection.weight"].shape[0],
                hidden_dim=weights["mlp.fc1.weight"].shape[0],
                num_heads=heads,
                activation=activation,
                layer_norm_eps=eps,
            )
        elif "0.weight" in weights:
            self._require(weights, "2.weight")
            hidden, width = weights["0.weight"].shape
            # The checkpoint does not record the number of patches; import_checkpoint sets it.
            config = AdapterConfig(LOCAL, 1, width, weights["2.weight"].shape[0], hidden, activation=activation)
        else:
            raise ModelError(
                f"{self.path} has no adapter: it lacks both {ADAPTER_PREFIX}query and {ADAPTER_PREFIX}0.weight; "
                "give another checkpoint"
            )
        adapter = build_adapter(config)
        assign_weights(adapter, weights, f"the adapter of {self.path}")
        return adapter

    def _require(self, weights: State, *names: str) -> None:
        missing = [name for name in names if name not in weights]
        if missing:
            raise ModelError(
                f"{self.path} is not a checkpoint of the published training code: it lacks the weights "
                f"{', '.join(missing)}; give another checkpoint"
            )


def load_published_checkpoint(
    checkpoint: str | Path, tokenizer_dir: str | Path, *, vision_heads: int, layer_norm_eps: float = 1e-6
) -> PublishedModel:
    """Load the model from a checkpoint of the published training code. No code in the file runs.

    Args:
        checkpoint: checkpoint file (``.pth``).
        tokenizer_dir: directory with the tokenizer and the ``config.json`` of the joint encoder.
        vision_heads: number of attention heads of the vision tower. A compressed adapter has the same number.
        layer_norm_eps: epsilon of the layer norms of the vision tower. A compressed adapter has the same epsilon.

    Raises:
        ModelError: the file is not a checkpoint of the published training code, its parts do not fit each other, a
            weight is NaN or infinite, or the tokenizer cannot be read.

    Example:
        >>> import torch
        >>> from edje_index import load_published_checkpoint
        >>> model = load_published_checkpoint("checkpoint.pth", "tokenizer", vision_heads=2)
        >>> tokens = model.adapter(torch.zeros(1, 16, 32))  # 16 patches of a tower of width 32
        >>> tokens.shape, model.score("a red car", tokens).shape
        (torch.Size([1, 6, 16]), torch.Size([1]))
    """
    published = PublishedCheckpoint.read(Path(checkpoint))
    return published.model(Path(tokenizer_dir), vision_heads=vision_heads, layer_norm_eps=layer_norm_eps)
