"""Generates with one engine of roll, together and alone, for `bitwise.py`. Started by it, as a process.

    python -m benchmarks.bitwise_engine FOLDER NAME

Reads FOLDER/work.json and writes FOLDER/NAME.npz. See `benchmarks.bitwise_work` for the signs by which it waits.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bitwise_work import ENGINES, Work, wait_for_go
from roll.backend import GenerateStrategy, Rank
from roll.config.schema.model import ModelConfig
from roll.engines.vllm.settings import VllmConfig, VllmSettings
from roll.types import Completion, Ints, Sampling

SEEDS_APART = 1000
"""Difference between the seeds of two prompts."""
START_SECONDS = 900.0
BATCHED_TOKENS = 512
"""Tokens of an engine step: so few that some prompts are read while other requests generate."""


def settings(work: Work, name: str) -> VllmSettings:
    """Return the settings of an engine as roll would make them, for a GPU that it shares with others."""
    own: dict[str, Any] = ENGINES[name]
    block = {
        "max_num_seqs": work.prompts,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "kv_cache_gib": 0.25,
        "gpu_memory_utilization": 0.1,
        **own,
    }
    if work.device == "cuda":
        block["engine_args"] = {"kv_cache_memory_bytes": 2 << 30, **own.get("engine_args", {})}
    context = work.prompt_tokens + work.response_tokens
    model_args = ModelConfig.model_validate({"dtype": work.dtype})
    engine = VllmConfig.model_validate(block)
    return VllmSettings(str(work.model_folder), model_args, engine, context, None, 0, False, False)


async def responses(strategy: GenerateStrategy, prompts: Sequence[Ints], first: int, tokens: int) -> list[Completion]:
    """Return a response to each prompt, generated together. `first`: number of the first prompt, for the seeds."""
    sampling = Sampling(tokens, ignore_eos=True)

    async def one(number: int, prompt: Ints) -> Completion:
        found = [pair async for part in strategy.generate(prompt, sampling, number * SEEDS_APART) for pair in part]
        return found[0][1]

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts, first))))


def stacked(name: str, found: Sequence[Completion]) -> dict[str, Any]:
    """Return token ids and log-probs as arrays [N, tokens], for a file."""
    log_probs = [one.log_probs for one in found if one.log_probs is not None]
    return {f"{name}_ids": np.stack([one.token_ids for one in found]), f"{name}_log_probs": np.stack(log_probs)}


async def measure(work: Work, folder: Path, name: str) -> dict[str, Any]:
    """Return what the engine generated: all prompts together, twice, and the first ones each alone."""
    rank = Rank("actor_infer", 0, 1, "127.0.0.1", 0, work.device, START_SECONDS)
    strategy = settings(work, name).build(rank)
    await strategy.start()
    try:
        prompts = work.draw_prompts()
        await responses(strategy, [prompts[0][::-1].copy()], 0, 4)  # the first request compiles what is left
        await asyncio.to_thread(wait_for_go, folder, name)
        begin = time.perf_counter()
        together = await responses(strategy, prompts, 0, work.response_tokens)
        seconds = time.perf_counter() - begin
        again = await responses(strategy, prompts, 0, work.response_tokens)
        alone: list[Completion] = []
        for number, prompt in enumerate(prompts[: work.alone]):
            alone += await responses(strategy, [prompt], number, work.response_tokens)
    finally:
        await strategy.close()
    ways = {"together": together, "again": again, "alone": alone}
    return {key: array for way, found in ways.items() for key, array in stacked(way, found).items()} | {
        "seconds": seconds
    }


def main() -> None:
    """Generate with the engine that the command line names."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    found = asyncio.run(measure(Work.read(folder), folder, name))
    np.savez(folder / f"{name}.partial.npz", **found)
    (folder / f"{name}.partial.npz").rename(folder / f"{name}.npz")


if __name__ == "__main__":
    main()
