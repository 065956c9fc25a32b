"""Model FLOPs of training, and what devices can do: the two sides of MFU, the model FLOPs utilisation."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

DENSE_BF16_PEAKS: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"B200"}), 2.25e15),
    (frozenset({"H200", "NVL"}), 835e12),
    (frozenset({"H200"}), 989e12),
    (frozenset({"GH200"}), 989e12),
    (frozenset({"H100", "NVL"}), 835e12),
    (frozenset({"H100", "PCIe"}), 756e12),
    (frozenset({"H100"}), 989e12),
    (frozenset({"A100"}), 312e12),
    (frozenset({"A800"}), 312e12),
    (frozenset({"L40S"}), 362e12),
    (frozenset({"L4"}), 121e12),
)
"""Words of a GPU's name, and the FLOP/s that NVIDIA's data sheet gives for its dense bf16 products; a more special name comes first."""


def dense_bf16_peak(device_name: str) -> float | None:
    """FLOP/s of a GPU by the name that CUDA gives it. None for one that is not known, and for a part of one (MIG)."""
    words = set(re.findall(r"\w+", device_name))
    return next((peak for known, peak in DENSE_BF16_PEAKS if known <= words and "MIG" not in words), None)


@dataclass(frozen=True)
class TrainingFlops:
    """Model FLOPs of forward and backward passes over packed sequences.

    Counted for each token are two operations a parameter forwards, two for the gradient of what it multiplies, and two for the
    gradient of the parameter itself, if it learns: 6 N where all N learn (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Added
    is causal attention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, halved, for no token attends to later ones). Recomputation
    is not counted, because it is not work of the model.
    """

    parameters: int
    """All, an adapter's among them."""
    trained: int
    """Parameters that learn."""
    attending: float = 0.0
    """FLOP of one token's attending to one other in a forward pass; 0 leaves attention out."""

    def of(self, lengths: ArrayLike) -> float:
        """FLOP of one forward and backward pass over sequences of these lengths, [N] in tokens."""
        tokens = np.asarray(lengths, np.float64)
        products = (4 * self.parameters + 2 * self.trained) * tokens.sum()
        # Half of the pairs; each of attention's two products has two operands, and both have a gradient.
        return float(products + 3 * self.attending * (tokens**2).sum() / 2)
