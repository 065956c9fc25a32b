"""Model FLOPs of training and peak FLOP/s of devices, whose ratio is the model FLOPs utilisation (MFU)."""

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
"""Words of a GPU's name, and its dense bf16 FLOP/s in NVIDIA's data sheet. More special names come first."""


def dense_bf16_peak(device_name: str) -> float | None:
    """Return the FLOP/s of a GPU by its CUDA name. None for an unknown one and for a part of one (MIG)."""
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
    """Number of all parameters, including an adapter's."""
    trained: int
    """Parameters that learn."""
    attending: float = 0.0
    """FLOP of one token's attention to another in a forward pass. 0 leaves attention out."""

    def of(self, lengths: ArrayLike) -> float:
        """Return the FLOP of one forward and backward pass over sequences of these lengths, [N] in tokens."""
        tokens = np.asarray(lengths, np.float64)
        products = (4 * self.parameters + 2 * self.trained) * tokens.sum()
        # Half of the pairs. Each of attention's two products has two operands, both with a gradient.
        return float(products + 3 * self.attending * (tokens**2).sum() / 2)
