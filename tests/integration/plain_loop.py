"""An oracle of text search: one pair at a time, in float32, by transformers,
open_clip, zarr-python and NumPy.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import zarr

from edje_index.bundles.bundle import ModelBundle
from edje_index.scoring.parts import content_token_mask


class PlainLoop:
    """Searches the index at `root` with the bundle at `model`, without batches and
    without this project's scorers.
    """

    def __init__(self, root: Path, model: Path) -> None:
        self.bundle = ModelBundle.load(model)
        self.weights = self.bundle.score.t2i.by_part()
        self._tokens: Any = zarr.open_group(root / "tokens", mode="r")["bf16"]
        self._embeddings = np.asarray(
            zarr.open_array(root / "embeddings", mode="r")[:], dtype=np.float32
        )

    @torch.inference_mode()
    def search(self, text: str, pool: int) -> list[tuple[int, float, dict[str, float]]]:
        """(row id, final score, parts) of each candidate, best first."""
        similarities = self._embeddings @ self.bundle.text.encode([text])[0]
        candidates = np.argsort(-similarities, kind="stable")[
            : min(pool, np.isfinite(similarities).sum())
        ]
        caption = self._caption_vector(text) if "pooled" in self.weights else None
        hits = []
        for row in map(int, candidates):
            tokens = self._tokens[row].view(ml_dtypes.bfloat16).astype(np.float32)
            parts = {
                "logit": self._logit(text, tokens),
                "embedding": float(similarities[row]),
            }
            parts |= (
                {"late": self._late(text, tokens)} if "late" in self.weights else {}
            )
            parts |= (
                {"pooled": float(self._image_vector(tokens) @ caption)}
                if caption is not None
                else {}
            )
            hits.append(
                (
                    row,
                    sum(weight * parts[part] for part, weight in self.weights.items()),
                    parts,
                )
            )
        return sorted(hits, key=lambda hit: (-hit[1], hit[0]))

    def _logit(self, text: str, tokens: np.ndarray) -> float:
        inputs = self.bundle.joint.tokenizer.inputs([text], len(tokens))
        return float(self.bundle.joint(inputs, torch.from_numpy(tokens)[None]))

    @cached_property
    def _words(self) -> np.ndarray:
        words: np.ndarray = self.bundle.joint.text_embeddings.weight.detach().numpy()
        return words

    def _late(self, text: str, tokens: np.ndarray) -> float:
        tokenizer = self.bundle.joint.tokenizer
        ids = [
            token_id
            for token_id in tokenizer.caption_ids([text])[0]
            if content_token_mask(tokenizer)[token_id]
        ]
        mean = self._words.mean(axis=0)
        keys = [unit(token - mean) for token in tokens]
        best = [
            max(float(unit(self._words[token_id] - mean) @ key) for key in keys)
            for token_id in ids
        ]
        return sum(best) / max(len(best), 1)

    def _image_vector(self, tokens: np.ndarray) -> np.ndarray:
        maps = self.bundle.pooled
        if maps is None:
            return np.zeros(0, np.float32)
        statistics = np.concatenate(
            [tokens.mean(axis=0), tokens.std(axis=0), tokens.max(axis=0)]
        )
        return unit(statistics @ maps.image.numpy() + maps.image_offset.numpy())

    def _caption_vector(self, text: str) -> np.ndarray:
        joint = self.bundle.joint
        maps = self.bundle.pooled
        assert maps is not None
        inputs = joint.tokenizer.inputs([text], 0)
        bert = joint.language_model.bert
        hidden = bert(
            input_ids=inputs.input_ids, token_type_ids=inputs.token_type_ids
        ).last_hidden_state
        bag = np.zeros(len(maps.word_numbers), np.float32)
        present = np.isin(
            maps.word_numbers.numpy(), joint.tokenizer.caption_ids([text])[0]
        )
        bag[present] = maps.word_weights.numpy()[present]
        mapped = (
            hidden[0].mean(dim=0).numpy() @ maps.sentence.numpy()
            + unit(bag) @ maps.words.numpy()
        )
        return unit(mapped + maps.caption_offset.numpy())


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector divided by its length; zero stays zero."""
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector
