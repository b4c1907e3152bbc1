"""What a precision does to tokens: relative error and cosine of each, collected over pieces of an index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edje_index.evaluation.quantization_report.distribution import Distribution
from storage_formats.codecs import Blocks


@dataclass(frozen=True)
class TokenErrors:
    """Errors of tokens against their reference.

    Attributes:
        tokens: number compared.
        zero_tokens: reference tokens of length zero; they have no relative error and are left out below.
        relative_error: |token - reference| / |reference| of each token; its `highest` is the worst.
        cosine: of each token and its reference; its `lowest` is the worst. A token that became zero counts as 0.
    """

    tokens: int
    zero_tokens: int
    relative_error: Distribution
    cosine: Distribution


class TokenErrorMeter:
    """Collects errors over pieces; 8 bytes a token are kept."""

    def __init__(self) -> None:
        self._errors: list[NDArray[np.float32]] = []
        self._cosines: list[NDArray[np.float32]] = []
        self._tokens = 0

    def add(self, reference: Blocks, other: Blocks) -> None:
        """Compare blocks [k, m, d] without holes with their reference."""
        errors, cosines = compare_tokens(reference, other)
        self._tokens += reference.shape[0] * reference.shape[1]
        self._errors.append(errors)
        self._cosines.append(cosines)

    def result(self) -> TokenErrors | None:
        """What was collected; None where no token had a length."""
        errors, cosines = (np.concatenate([*parts, np.empty(0, np.float32)]) for parts in (self._errors, self._cosines))
        if not len(errors):
            return None
        return TokenErrors(self._tokens, self._tokens - len(errors), Distribution.of(errors), Distribution.of(cosines))


def compare_tokens(reference: Blocks, other: Blocks) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(relative error, cosine) of every token [m, d] of `other` against `reference`, flat, zero references left out.

    Sums are float64: squares of bfloat16 numbers do not fit float32.
    """
    left = reference.astype(np.float64).reshape(-1, reference.shape[-1])
    right = other.astype(np.float64).reshape(left.shape)
    squares = np.einsum("td,td->t", left, left)
    there = squares > 0
    left, right, lengths = left[there], right[there], np.sqrt(squares[there])
    products, other_lengths = np.einsum("td,td->t", left, right), np.sqrt(np.einsum("td,td->t", right, right))
    cosines = np.divide(products, lengths * other_lengths, out=np.zeros_like(products), where=other_lengths > 0)
    right -= left
    errors = np.sqrt(np.einsum("td,td->t", right, right)) / lengths
    return errors.astype(np.float32), np.clip(cosines, -1, 1).astype(np.float32)
