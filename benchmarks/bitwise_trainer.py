"""Scores the tokens that the engines of `bitwise.py` sampled, with roll's forward pass and with vLLM's kernels in it.
Started by it, as a process.

    python -m benchmarks.bitwise_trainer FOLDER ENGINE...
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import bitwise_kernels
from benchmarks.bitwise_work import Difference, Work, wait_for_go
from roll.backend import Rank
from roll.config.schema.model import ModelConfig
from roll.data.packing import concatenate
from roll.engines.hf.settings import HfScoreSettings
from roll.models.load import load_fixed_model
from roll.models.packed import PackedPolicy, packed_inputs
from roll.types import Ints, Sequences

NAME = "trainer"
Floats32 = NDArray[np.float32]
Score = Callable[[Sequences], Floats32]
"""Returns the log-probs of a micro-batch's response tokens, [S]."""


def packed(prompts: Sequence[Ints], responses: Sequence[Ints], budget: int) -> Iterator[Sequences]:
    """Yield micro-batches of at most `budget` tokens, or of one longer sequence."""
    rows: list[tuple[Ints, Ints]] = []
    for pair in zip(prompts, responses, strict=True):
        if rows and sum(len(part) for row in (*rows, pair) for part in row) > budget:
            yield _joined(rows)
            rows = []
        rows.append(pair)
    if rows:
        yield _joined(rows)


def _joined(rows: Sequence[tuple[Ints, Ints]]) -> Sequences:
    ids = [np.concatenate(row) for row in rows]
    return concatenate(ids, [np.arange(len(one)) >= len(prompt) for one, (prompt, _) in zip(ids, rows, strict=True)])


def as_scored(work: Work, **keys: Any) -> Score:
    """Return the scoring of roll's own strategy with further keys of `model_args`. It compiles layers on a GPU."""
    model_args = ModelConfig.model_validate({"dtype": work.dtype} | keys)
    settings = HfScoreSettings(work.model_folder, model_args, PackedPolicy)
    strategy = settings.build(Rank("reference", 0, 1, "127.0.0.1", 0, work.device, 900.0))

    def score(part: Sequences) -> Floats32:
        [found] = strategy.log_probs([part], 1.0)  # pyright: ignore[reportAttributeAccessIssue]
        return found[part.response_mask]

    return score


def load_policy(work: Work) -> PackedPolicy:
    """Return the policy as roll prepares it for scoring, with layers that are not compiled."""
    model = load_fixed_model(work.model_folder, ModelConfig.model_validate({"dtype": work.dtype}))
    return PackedPolicy(model).to(work.device).eval()


def with_kernels(policy: PackedPolicy, kernels: bitwise_kernels.Kernels, device: str) -> Score:
    """Return the scoring of the policy with the given kernels."""

    def score(part: Sequences) -> Floats32:
        return bitwise_kernels.scored(policy.causal, packed_inputs(part, device), kernels).cpu().numpy()

    return score


def all_ways(work: Work) -> dict[str, Score]:
    """Return the ways to score by name. Those with vLLM's kernels need a GPU."""
    policy, ways = load_policy(work), {"roll's scoring": as_scored(work)}
    rungs = [("roll's forward, not compiled", bitwise_kernels.PLAIN)]
    if work.device == "cuda":
        rungs = bitwise_kernels.ladder()
        ways["roll's scoring, engine_kernels"] = as_scored(work, engine_kernels=True)
        rungs.append(("all of these, roll's head", replace(rungs[-1][1], log_probs=bitwise_kernels.plain_log_probs)))
    return ways | {name: with_kernels(policy, kernels, work.device) for name, kernels in rungs}


def scores(score: Score, prompts: Sequence[Ints], responses: Sequence[Ints], budget: int) -> tuple[Floats32, float]:
    """Return the log-probs of all response tokens, and the seconds."""
    begin = time.perf_counter()
    found = [score(part) for part in packed(prompts, responses, budget)]
    return np.concatenate(found), time.perf_counter() - begin


def against_engine(work: Work, score: Score, generated: Any) -> dict[str, Any]:
    """Return how far the scores are from the engine's log-probs, and from themselves: scored again, and alone."""
    prompts, ids, engine = work.draw_prompts(), list(generated["together_ids"]), generated["together_log_probs"]
    found, _ = scores(score, prompts, ids, work.budget)
    again, seconds = scores(score, prompts, ids, work.budget)
    alone, _ = scores(score, prompts[: work.alone], ids[: work.alone], budget=1)
    return {
        "difference": asdict(Difference.of(engine.reshape(-1), found)),
        "again_equal": float((found == again).mean()),
        "alone_equal": float((found[: len(alone)] == alone).mean()),
        "alone_largest": float(np.abs(found[: len(alone)] - alone).max()),
        "seconds": seconds,
    }


def tried(ways: dict[str, Score], work: Work) -> dict[str, str]:
    """Score random responses in each way, so that its kernels are compiled. Return the errors of those that fail."""
    generator, failed = np.random.default_rng(1), {}
    prompts = work.draw_prompts()
    ids = [generator.integers(0, work.vocabulary, work.response_tokens).astype(np.int32) for _ in prompts]
    for name, score in ways.items():
        try:
            scores(score, prompts, ids, work.budget)
            scores(score, prompts[:1], ids[:1], budget=1)
        except Exception as error:  # a kernel that is missing on this device must not hide what the others measure
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return failed


def main() -> None:
    """Score what the engines that the command line names have generated."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # read by vLLM's kernels, which are loaded after roll's own scoring
    work = Work.read(folder)
    ways = all_ways(work)
    failed = tried(ways, work)
    wait_for_go(folder, NAME)
    measured: dict[str, dict[str, Any]] = {name: {} for name in names if (folder / f"{name}.npz").exists()}
    file = folder / f"{NAME}.json"
    for engine, found in measured.items():
        for name in [name for name in ways if name not in failed]:
            found[name] = against_engine(work, ways[name], np.load(folder / f"{engine}.npz"))
            new = file.with_suffix(".new")
            new.write_text(json.dumps({"failed": failed, "measured": measured}), encoding="utf-8")
            new.replace(file)  # at once: the benchmark may be cut now


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
