"""Engines that see pictures: their log-probs are the trainer's, also after a sync of all weights, with the tower's."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from PIL import Image

from examples.tiny.make_seeing_model import FAMILIES, write_seeing_model
from roll.backend import Rank
from roll.config.schema.model import DataConfig, ModelConfig
from roll.config.schema.roles import RewardConfig
from roll.data import packing
from roll.data.pictures import Sight, load_sight
from roll.data.prompts import prepare_prompts
from roll.engines.hf.settings import HfScoreSettings
from roll.models.load import load_tokenizer
from roll.models.packed import PackedPolicy, packed_inputs
from roll.rollout.batch import Experience, Shaping, experience
from roll.rollout.group import Generator, SingleTurns
from roll.types import Prompt, RewardResult, RolloutGroup, Sampling
from tests import limits
from tests.engines.generating import SEEING_ARGS, Running, policy, running
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("as_in_workers")

TOLERANCE = 1e-5
"""Largest allowed difference in fp32, in nats per token."""
SHOWN: Sequence[Sequence[tuple[int, int]]] = ([(40, 24)], [], [(17, 40), (48, 30), (16, 16)], [(33, 47)])
"""By prompt, the width and height of each picture."""
ENGINES = [*(f"hf-{family}" for family in FAMILIES), "vllm-idefics3"]
"""vLLM's processors of the other families need torchvision, which the builds for the CPU lack."""
QUICK = ["hf-qwen2_5_vl", "vllm-idefics3"]


class Unscored:
    """Implements `Scorer`: gives each response the reward 0."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        return [RewardResult(0.0) for _ in responses]

    def compares(self, prompt: Prompt) -> bool:
        return False

    def combined(self, prompt: Prompt, results: Sequence[RewardResult]) -> Sequence[RewardResult]:
        return results


@dataclasses.dataclass(frozen=True)
class Seeing:
    """An engine of a model that sees pictures, and prompts for it."""

    engine: Running
    prompts: list[Prompt]
    sight: Sight

    def groups(self, sampling: Sampling) -> list[RolloutGroup]:
        """Return the group of each prompt. All are sampled at the same time."""
        turns = SingleTurns(
            cast(Generator, self.engine.engine),
            Unscored(),
            dataclasses.replace(sampling, placeholder=self.sight.token_id),
        )

        async def sample() -> list[RolloutGroup]:
            return list(await asyncio.gather(*(turns.sample(prompt, None) for prompt in self.prompts)))

        return self.engine.wait(sample())


def prompts_of(folder: Path, model: Path) -> tuple[list[Prompt], Sight]:
    """Write rows with pictures of noise, and return their prompts."""
    generator, rows = np.random.default_rng(3), []
    for number, sizes in enumerate(SHOWN):
        parts: list[dict[str, str]] = []
        for place, (width, height) in enumerate(sizes):
            noise = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
            noise.save(folder / f"{number}-{place}.png")
            parts += [{"type": "image", "path": f"{number}-{place}.png"}, {"type": "text", "text": f"{place}"}]
        rows.append({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data_args = DataConfig.model_validate({"file_name": str(folder / "rows.jsonl"), "messages": "messages"})
    tokenizer = load_tokenizer(str(model))
    sight = load_sight(str(model), tokenizer, asked=True)
    assert sight is not None
    sections = {"seen": RewardConfig.model_validate({"reward": "exact_match"})}
    found = prepare_prompts(data_args, tokenizer, 512, sections, folder / "cache", sight=sight)
    return [found.prompt(index, index) for index in range(len(found))], sight


@pytest.fixture(scope="module", params=tiered(ENGINES, QUICK))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    kind, _, family = request.param.partition("-")
    folder = tmp_path_factory.mktemp(f"{kind}-{family}")
    write_seeing_model(folder / "model", family, seed=0)
    prompts, sight = prompts_of(folder, folder / "model")
    with running(kind, folder / "model", folder, model_args=SEEING_ARGS) as one:
        yield Seeing(one, prompts, sight)


@torch.no_grad()
def trainers_log_probs(current: PackedPolicy, step: Experience) -> np.ndarray:
    """Return the log-probs of the sampled tokens, [S], computed for two sequences at a time."""
    parts = []
    for first in range(0, len(step.sequences), 2):
        chosen = packing.select(step.sequences, range(first, min(first + 2, len(step.sequences))))
        parts.append(current.eval()(packed_inputs(chosen, "cpu"))[0].numpy())
    return np.concatenate(parts)


def assert_at_the_policy(seeing: Seeing, current: PackedPolicy) -> np.ndarray:
    step = experience(seeing.groups(Sampling(10, samples=3)), Shaping())
    assert step.sequences.shown is not None and step.behaviour_log_probs is not None
    assert step.sequences.shown.counts.tolist() == [1] * 3 + [0] * 3 + [3] * 3 + [1] * 3
    found = step.behaviour_log_probs[step.sequences.response_mask]
    np.testing.assert_allclose(found, trainers_log_probs(current, step), rtol=0, atol=TOLERANCE)
    return found


def test_log_probs_of_pictures_are_the_trainers(seeing: Seeing) -> None:
    assert_at_the_policy(seeing, seeing.engine.policy)


def test_synced_engine_sees_with_new_tower(seeing: Seeing) -> None:
    before, current = seeing.engine.policy, policy(seeing.engine.folder / "model", 7, SEEING_ARGS)
    seeing.engine.push(current)
    assert_at_the_policy(seeing, current)
    # The tower alone changes, so that an engine with cached features of the pictures would be found out.
    tower = policy(seeing.engine.folder / "model", 7, SEEING_ARGS)
    for name, parameter in tower.causal.named_parameters():
        if "visual" in name or "vision" in name or "connector" in name:
            parameter.data.copy_(before.causal.get_parameter(name).data)
    seeing.engine.push(tower)
    assert_at_the_policy(seeing, tower)


def test_responses_end_before_a_placeholder(seeing: Seeing) -> None:
    likely = policy(seeing.engine.folder / "model", 7, SEEING_ARGS)
    head = likely.causal.get_output_embeddings()
    assert head is not None
    weight = head.weight.data
    assert isinstance(weight, torch.Tensor)
    weight[seeing.sight.token_id] = 8 * weight.std() * torch.randn(len(weight[0]), generator=torch.manual_seed(1))
    seeing.engine.push(likely)
    groups = seeing.groups(Sampling(40, samples=8))
    responses = [episode.sampled[0] for group in groups for episode in group.episodes]
    assert not any(seeing.sight.token_id in segment.token_ids for segment in responses)
    assert any(len(segment.token_ids) < 40 for segment in responses)
    step = experience(groups, Shaping())
    assert step.behaviour_log_probs is not None
    found = step.behaviour_log_probs[step.sequences.response_mask]
    np.testing.assert_allclose(found, trainers_log_probs(likely, step), rtol=0, atol=10 * TOLERANCE)


def test_reference_sees_what_policy_sees(seeing: Seeing) -> None:
    model, args = seeing.engine.folder / "model", ModelConfig.model_validate({"dtype": "fp32", "sees_pictures": True})
    rank = Rank("reference", 0, 1, "127.0.0.1", 0, "cpu", limits.START)
    reference = HfScoreSettings(str(model), args, PackedPolicy).build(rank)
    step = experience(seeing.groups(Sampling(6, samples=2)), Shaping())
    [found] = reference.log_probs([packing.select(step.sequences, range(len(step.sequences)))], 1.0)
    reference.close()
    expected = trainers_log_probs(policy(model, None, SEEING_ARGS), step)
    np.testing.assert_allclose(found[step.sequences.response_mask], expected, rtol=0, atol=TOLERANCE)
