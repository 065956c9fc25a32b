"""A mixture of experts in vLLM on the CPU: its log-probs equal the trainer's before and after a sync, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from roll.models.packed import PackedPolicy
from roll.types import Sampling
from tests.engines.generating import PROMPTS, Running, adapted, engine_log_probs, log_probs, policy, running

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("as_in_workers")]
TOLERANCE = 1e-5
"""Largest allowed difference, in nats per token."""


@pytest.fixture(scope="module")
def engine(expert_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Return an engine that receives all weights."""
    with running("vllm", expert_model, tmp_path_factory.mktemp("experts")) as one:
        yield one


def largest_difference(one: Running, before: PackedPolicy | None = None) -> float:
    """Return the largest difference between the engine's and the trainer's log-probs over all sampled tokens.

    With `before`, also check that the engine has clearly left that policy.
    """
    worst, moved = 0.0, 0.0
    for prompt, completions in zip(PROMPTS, one.generate(PROMPTS, Sampling(30, samples=4)), strict=True):
        for completion in completions:
            assert completion.policy_versions.tolist() == [one.version] * len(completion.token_ids)
            worst = max(
                worst, np.abs(engine_log_probs(completion) - log_probs(one.policy, prompt, completion, 1.0)).max()
            )
            if before is not None:
                moved = max(
                    moved, np.abs(engine_log_probs(completion) - log_probs(before, prompt, completion, 1.0)).max()
                )
    assert before is None or moved > 0.1
    return worst


def test_whole_weights(engine: Running, expert_model: Path) -> None:
    assert largest_difference(engine) < TOLERANCE
    before = engine.policy
    engine.push(policy(expert_model, seed=1))
    assert largest_difference(engine, before) < TOLERANCE


def test_experts_alone_reach_the_engine(engine: Running, expert_model: Path) -> None:
    engine.push(policy(expert_model))
    before, moved = engine.policy, policy(expert_model)
    for name, parameter in moved.causal.named_parameters():
        if ".experts." in name:
            parameter.data.mul_(1.5)
    engine.push(moved)
    assert largest_difference(engine, before) < TOLERANCE


def test_merged_expert_and_router_adapter_matches_engine(engine: Running, expert_model: Path) -> None:
    engine.push(policy(expert_model))
    before = engine.policy
    engine.push(adapted(expert_model, seed=2))
    assert largest_difference(engine, before) < TOLERANCE
