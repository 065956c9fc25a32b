"""Rates of GPUs from their data sheets, and the model FLOPs of training. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuRates:
    """The rates of one kind of GPU, from NVIDIA's data sheet."""

    words: tuple[str, ...]
    """Words in its name."""
    bf16_peak: float
    """Dense bf16 FLOP/s."""
    bandwidth: float
    """Bytes per second between the GPU and its memory."""

    @property
    def name(self) -> str:
        return " ".join(self.words)


GPUS = (
    GpuRates(("B200",), 2.25e15, 8.0e12),
    GpuRates(("H200", "NVL"), 835e12, 4.8e12),
    GpuRates(("H200",), 989e12, 4.8e12),
    GpuRates(("GH200",), 989e12, 4.0e12),
    GpuRates(("H100", "NVL"), 835e12, 3.9e12),
    GpuRates(("H100", "PCIe"), 756e12, 2.0e12),
    GpuRates(("H100",), 989e12, 3.35e12),
    GpuRates(("A100", "80GB"), 312e12, 2.0e12),
    GpuRates(("A100",), 312e12, 1.555e12),
    GpuRates(("A800",), 312e12, 2.0e12),
    GpuRates(("L40S",), 362e12, 0.864e12),
    GpuRates(("L4",), 121e12, 0.3e12),
)
"""More specific names come first."""


def gpu_rates(device_name: str) -> GpuRates | None:
    """Return the rates of a GPU by its name in CUDA or in the driver. None for unknown GPUs and MIG slices."""
    words = set(re.findall(r"\w+", device_name))
    return next((gpu for gpu in GPUS if words.issuperset(gpu.words) and "MIG" not in words), None)


def training_flops(parameters: int, trained: int, attending: float, tokens: float, squares: float) -> float:
    """Return the FLOPs of one forward and backward pass over packed sequences; see `roll.models.flops.TrainingFlops`.

    Args:
        attending: FLOPs of one token's attention to one other token in a forward pass.
        tokens: number of all tokens.
        squares: sum of the squared lengths of the sequences in tokens.
    """
    # A causal mask leaves half of the pairs. The backward pass costs twice the forward pass, because both operands have
    # a gradient.
    return (4 * parameters + 2 * trained) * tokens + 3 * attending * squares / 2
