"""Measures the relative error and the cosine similarity of quantized tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edje_index.evaluation.quantization_report.distribution import Distribution
from storage_formats.codecs import Blocks


@dataclass(frozen=True)
class TokenErrors:
    """Errors of quantized tokens, compared with reference tokens.

    Attributes:
        tokens: number of tokens.
        zero_tokens: number of reference tokens that are zero vectors. They are left out of both distributions.
        relative_error: distribution of |token - reference| / |reference|. Its maximum is the worst value.
        cosine: distribution of the cosine similarity between token and reference. Its minimum is the worst value. The
            similarity to a zero vector is 0.
    """

    tokens: int
    zero_tokens: int
    relative_error: Distribution
    cosine: Distribution


class TokenErrorMeter:
    """Measures token errors over several batches. Needs 8 bytes of memory per token."""

    def __init__(self) -> None:
        self._errors: list[NDArray[np.float32]] = []
        self._cosines: list[NDArray[np.float32]] = []
        self._tokens = 0

    def add(self, reference: Blocks, other: Blocks) -> None:
        """Add the errors of `other` [k, m, d], compared with `reference` [k, m, d]. Holes are not allowed."""
        errors, cosines = compare_tokens(reference, other)
        self._tokens += reference.shape[0] * reference.shape[1]
        self._errors.append(errors)
        self._cosines.append(cosines)

    def result(self) -> TokenErrors | None:
        """Return the errors over all batches. Return None if all reference tokens are zero vectors."""
        errors, cosines = (np.concatenate([*parts, np.empty(0, np.float32)]) for parts in (self._errors, self._cosines))
        if not len(errors):
            return None
        return TokenErrors(self._tokens, self._tokens - len(errors), Distribution.of(errors), Distribution.of(cosines))


def compare_tokens(reference: Blocks, other: Blocks) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the relative errors and the cosine similarities of n tokens, float32 [n] each.

    Tokens are left out if the reference token is a zero vector.
    """
    # Sums are computed in float64, because squares of bfloat16 numbers overflow float32.
    left = reference.astype(np.float64).reshape(-1, reference.shape[-1])
    right = other.astype(np.float64).reshape(left.shape)
    squares = np.einsum("td,td->t", left, left)
    is_nonzero = squares > 0
    left, right, lengths = left[is_nonzero], right[is_nonzero], np.sqrt(squares[is_nonzero])
    products, other_lengths = np.einsum("td,td->t", left, right), np.sqrt(np.einsum("td,td->t", right, right))
    cosines = np.divide(products, lengths * other_lengths, out=np.zeros_like(products), where=other_lengths > 0)
    right -= left
    errors = np.sqrt(np.einsum("td,td->t", right, right)) / lengths
    return errors.astype(np.float32), np.clip(cosines, -1, 1).astype(np.float32)
