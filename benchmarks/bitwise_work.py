"""What the processes of `bitwise.py` share: the work, the engines, and the signs by which one waits for another.

A process starts, writes FOLDER/NAME.ready, and measures once FOLDER/NAME.go exists, so that all of them can start at
the same time and yet each one measures alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.types import Ints

LOOK_EVERY = 0.02
FP32_HEAD = {"hf_overrides": {"head_dtype": "float32"}}
"""Arguments of vLLM with which logits are fp32, as the trainer's are."""
ENGINES: Mapping[str, dict[str, Any]] = {
    "today": {},
    "fp32-head": {"engine_args": FP32_HEAD},
    "invariant": {"batch_invariant": True},
    "invariant-uncompiled": {"batch_invariant": True, "compile_model": False},
    "invariant-eager": {"batch_invariant": True, "enforce_eager": True},
    "invariant-fp32": {"batch_invariant": True, "enforce_eager": True, "engine_args": FP32_HEAD},
}
"""Keys of vLLM's block by name of an engine."""
NEED_GPU = tuple(name for name, block in ENGINES.items() if "batch_invariant" in block)


@dataclass(frozen=True)
class Work:
    """What each process does."""

    model_folder: str
    dtype: str
    device: str
    prompts: int
    prompt_tokens: int
    response_tokens: int
    alone: int
    """Number of prompts that are also answered, and sequences that are also scored, alone."""
    budget: int
    """Tokens of a micro-batch of the trainer."""
    vocabulary: int
    seed: int

    def draw_prompts(self) -> list[Ints]:
        """Return random token ids, [prompt tokens] each. Lengths differ by up to a half, so that batches are ragged."""
        generator = np.random.default_rng(self.seed)
        lengths = generator.integers(self.prompt_tokens // 2, self.prompt_tokens, self.prompts, endpoint=True)
        return [generator.integers(0, self.vocabulary, length).astype(np.int32) for length in lengths]

    def write(self, folder: Path) -> None:
        """Write the work for the processes."""
        (folder / "work.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Work:
        """Read the work of this process."""
        return cls(**json.loads((folder / "work.json").read_text(encoding="utf-8")))


def wait_for_go(folder: Path, name: str) -> None:
    """Say that this process is ready, and wait for the sign to measure."""
    (folder / f"{name}.ready").touch()
    while not (folder / f"{name}.go").exists():
        time.sleep(LOOK_EVERY)


@dataclass(frozen=True)
class Difference:
    """How far log-probs of the same tokens are from those of the engine that sampled them."""

    largest: float
    mean: float
    kl: float
    """Estimate of the KL divergence of engine and trainer in nats a token: the mean of exp(d) - 1 - d."""
    equal: float
    """Share of tokens whose log-probs are equal bit for bit."""

    @classmethod
    def of(cls, engine: NDArray[np.float32], trainer: NDArray[np.float32]) -> Difference:
        """Compare log-probs of the same shape. fp32 numbers with the same bits are equal; so are two zeros."""
        apart = trainer.astype(np.float64) - engine.astype(np.float64)
        kl = np.expm1(apart) - apart
        return cls(
            float(np.abs(apart).max()), float(np.abs(apart).mean()), float(kl.mean()), float((apart == 0).mean())
        )


@dataclass(frozen=True)
class Repeat:
    """How far a second generation with the same seeds agrees with the first."""

    same_tokens: float
    """Share of responses with the same tokens."""
    same_log_probs: float
    """Share of tokens with equal log-probs, up to the first token that differs."""
    largest: float
    """Largest difference of log-probs among these tokens."""

    @classmethod
    def of(
        cls, ids: Ints, log_probs: NDArray[np.float32], other_ids: Ints, other_log_probs: NDArray[np.float32]
    ) -> Repeat:
        """Compare responses [N, T] to the same prompts."""
        differs = ids != other_ids
        shared = np.cumsum(differs, axis=1) == 0
        apart = np.abs(log_probs.astype(np.float64) - other_log_probs)[shared]
        same = float(np.mean(~differs.any(axis=1)))
        return cls(same, float((apart == 0).mean()) if apart.size else 0.0, float(apart.max(initial=0.0)))
