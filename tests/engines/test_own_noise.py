"""Samples without a seed: engines that hold the same model draw their tokens independently of each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.types import Sampling
from tests.engines.generating import PROMPTS, Running, make, running, whole

SAMPLING = Sampling(24, samples=1, ignore_eos=True)
"""One sample: vLLM draws for several in the order in which they reach it."""
SEEDED = 5


def sampled(engine: Running, seed: int | None = None) -> list[int]:
    """Return the tokens of a response."""
    [completion] = engine.wait(whole(engine.engine.generate(PROMPTS[1], SAMPLING, seed)))
    return completion.token_ids.tolist()


def first_answer(name: str, model: Path, folder: Path, rank: int = 0, seed: int = 0) -> list[int]:
    """Return the first response of an engine of this rank, in a run of this seed."""
    with running(name, model, folder, make(name, model, rank=rank, seed=seed)) as engine:
        return sampled(engine)


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_engines_draw_independently(name: str, small_model: Path, tmp_path: Path) -> None:
    first = first_answer(name, small_model, tmp_path)
    assert first == first_answer(name, small_model, tmp_path), "the noise is the run's seed's"
    assert first != first_answer(name, small_model, tmp_path, rank=1)
    assert first != first_answer(name, small_model, tmp_path, seed=1)


def test_a_seeded_request_does_not_repeat_noise(small_model: Path, tmp_path: Path) -> None:
    with running("hf", small_model, tmp_path) as engine:
        seen = [(sampled(engine, SEEDED), sampled(engine)) for _ in range(2)]
    (one, after_one), (two, after_two) = seen
    assert one == two and after_one != after_two
