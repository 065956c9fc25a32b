"""A hybrid model with Qwen3.5's architecture in the trainer and in the `hf_infer` engine: updates, samples, sync,
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from roll.config.schema.model import ModelConfig
from roll.models.load import load_causal_model
from roll.types import Sampling, TrainBatch
from tests.engines.batches import make_batch, shares, take
from tests.engines.generating import PROMPTS, Running, engine_log_probs, log_probs, policy, running
from tests.engines.plain import plain_updates
from tests.engines.ranks import run_ranks
from tests.engines.training import Case, Outcome, train_cases
from tests.hybrids import build_hybrid, write_hybrid

CASES = [Case(0, False), Case(3, False), Case(3, True)]
PROMPT = np.arange(70, dtype=np.int32)
"""A prompt that is longer than one chunk of the delta rule."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "model")


@pytest.fixture(scope="module")
def engine(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Return an engine that runs transformers' `generate`, with its cache of recurrent states."""
    with running("hf", hybrid, tmp_path_factory.mktemp("engine")) as one:
        yield one


def furthest(one: Running) -> float:
    """Return the largest difference between the log-probs of the engine and of the trainer's packed forward, in nats
    per token.
    """
    prompts = [*PROMPTS, PROMPT]
    answers = one.generate(prompts, Sampling(12, samples=2, ignore_eos=True))
    pairs = [
        (prompt, completion) for prompt, completions in zip(prompts, answers, strict=True) for completion in completions
    ]
    return max(
        float(np.abs(engine_log_probs(completion) - log_probs(one.policy, prompt, completion, 1.0)).max())
        for prompt, completion in pairs
    )


def test_hybrid_engine_agrees_with_trainer_around_sync(engine: Running, hybrid: Path) -> None:
    assert furthest(engine) < 1e-5
    before = engine.policy
    engine.push(policy(hybrid, seed=7))
    assert furthest(engine) < 1e-5
    engine.policy, new = before, engine.policy
    assert furthest(engine) > 0.1  # the engine has left the old policy
    engine.policy = new


@pytest.fixture(scope="module")
def batch(hybrid: Path) -> TrainBatch:
    return make_batch(hybrid)


@pytest.fixture(scope="module")
def outcomes(batch: TrainBatch, hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    """Run all cases on two ranks. Return the results of rank 0."""
    folder = tmp_path_factory.mktemp("train")
    first, _ = run_ranks(train_cases, 2, folder, CASES, hybrid, {False: shares(batch, 2, whole=False)}, folder)
    return dict(zip(CASES, first, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_packed_hybrid_updates_equal_adamw_on_single_sequences(
    outcomes: dict[Case, Outcome], batch: TrainBatch, hybrid: Path, case: Case
) -> None:
    one, two = take(batch, [0, 1, 2, 3]), take(batch, [4, 5, 6, 7])
    plain = plain_updates(hybrid, case.lora, [one, two, one, two])
    for got, expected in ((outcomes[case].first, plain[0]), (outcomes[case].second, plain[3])):
        assert got.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            torch.testing.assert_close(
                got[name], weight, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
    if case.stage:  # DeepSpeed does not keep the gradient norm for fp32 without ZeRO
        assert outcomes[case].first_result.scalars["policy/grad_norm"] == pytest.approx(plain[0].grad_norm, rel=1e-3)
    assert outcomes[case].resumed.keys() == outcomes[case].second.keys()
    for name, weight in outcomes[case].resumed.items():
        assert torch.equal(weight, outcomes[case].second[name]), name


def test_multimodal_engine_receives_names_of_its_checkpoint(tmp_path: Path) -> None:
    from roll.weight_sync.vllm_plugin import text_tensors

    seeing = build_hybrid("seeing")
    trained = load_causal_model(str(write_hybrid(tmp_path, "seeing")), ModelConfig.model_validate({"dtype": "fp32"}))
    sent = text_tensors(dict(trained.named_parameters()))
    own = {name: tensor for name, tensor in seeing.named_parameters() if not name.startswith("model.visual.")}
    assert sent.keys() == own.keys()
    assert all(torch.equal(sent[name], own[name]) for name in own)
    whole = dict(seeing.named_parameters())
    assert text_tensors(whole).keys() == whole.keys()
