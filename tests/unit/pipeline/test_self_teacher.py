"""A self-teacher's step: its gains against a transformers model in float64 that reads each response after the longer
prompt, and what is refused before a run starts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from roll.algorithms.advantages import Normalisation
from roll.backend import Rank
from roll.config.schema.model import DataConfig, ModelConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RewardConfig
from roll.config.schema.self_distillation import SelfDistillationConfig
from roll.data.prompts import prepare_prompts
from roll.data.teacher_prompts import teacher_prompts
from roll.errors import BadInput, FaultCode
from roll.models.load import load_fixed_model
from roll.models.packed import PackedPolicy, score
from roll.rewards.passing import USUAL
from roll.rollout.batch import Credit, CreditAssignment, Shaping, experience
from roll.runs.device_phases import DevicePhases
from roll.runs.rlvr.self_teacher import SelfTeacher, StepHints, self_teacher_of, step_hints_of
from roll.training.actor_train import share_out
from roll.types import Floats, RolloutGroup, Sequences
from tests.faults import coded
from tests.unit.data.conftest import tokenizer  # noqa: F401  # a fixture
from tests.unit.rollout.build import make_episode, make_group, make_trajectory, sampled

ROWS = DataConfig.model_validate({"file_name": "rows", "prompt": "question", "template": "chatml"})
KEYS = SelfDistillationConfig.model_validate(
    {"sees": ["success"], "weight": 0.5, "template": "{prompt} {hints}", "success_template": "e.g. {success}"}
)


class Asked:
    """Device phases and a meter that record what is onloaded, and what is timed."""

    def __init__(self) -> None:
        self.roles: list[str] = []

    async def scoring(self, role: str) -> None:
        self.roles.append(role)

    def part(self, name: str) -> AbstractContextManager[None]:
        assert name == "self_teacher"
        return nullcontext()


class Policy:
    """A small model that scores sequences packed, as a trainer does, and one by one in float64, with transformers."""

    def __init__(self, folder: Path, words: int, seed: int) -> None:
        shape: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": words,
        }
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
        model.save_pretrained(folder)
        args = ModelConfig.model_validate({"dtype": "fp32", "attn_implementation": "sdpa"})
        self.packed, self.plain = PackedPolicy(load_fixed_model(str(folder), args)), model.double().eval()
        self.calls: list[int] = []

    async def log_probs(self, sequences: Sequences) -> Floats:
        self.calls.append(len(sequences))
        split, [parts] = share_out(sequences, 1, 96)
        rank = cast(Rank, SimpleNamespace(device="cpu", role="actor_train", rank=0))
        out = np.zeros(len(sequences.token_ids), np.float32)
        with torch.no_grad():
            scores = score(self.packed, parts, 1.0, rank)
        for indices, values in zip(split.ranks[0], scores, strict=True):
            where = [range(sequences.offsets[index], sequences.offsets[index + 1]) for index in indices]
            out[[position for span in where for position in span]] = values
        return out

    @torch.no_grad()
    def exact(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
        """Return the log-prob of each token of a response, in float64."""
        logits = self.plain(input_ids=torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
        return [float(logits[len(prompt) + number - 1, token]) for number, token in enumerate(response)]


@pytest.fixture
def groups(tokenizer: PreTrainedTokenizerFast) -> list[RolloutGroup]:  # noqa: F811
    """Return two groups: one with a right response, and one without."""

    def group(number: int, question: str, texts: dict[str, float]) -> RolloutGroup:
        prompt_ids = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        episodes = []
        for text, reward in texts.items():
            # One token more than the text says: tokens are kept as they were sampled, not read from the text again.
            segment = sampled([*tokenizer(text)["input_ids"], 7], text=text)
            episodes.append(replace(make_episode([1], reward), trajectories=[make_trajectory(segment)]))
        made = make_group(number, episodes, prompt_ids)
        return replace(made, prompt=replace(made.prompt, row={"question": question}))

    right, wrong = {"two": 1.0, "three and one": 0.0, "is one": 0.0}, {"The answer": 0.0, "no": 0.0, "What": 0.0}
    return [group(0, "one and one?", right), group(1, "What is one?", wrong)]


def hints_of(keys: SelfDistillationConfig, tokenizer: PreTrainedTokenizerFast, most: int = 90) -> StepHints:  # noqa: F811
    return StepHints(keys, teacher_prompts(keys, ROWS, tokenizer), {"sums": USUAL}, most)


def test_gains_equal_transformers_with_the_longer_prompt(
    groups: list[RolloutGroup],
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
    tmp_path: Path,
) -> None:
    asked, student = Asked(), Policy(tmp_path / "student", len(tokenizer), 1)
    teacher = Policy(tmp_path / "teacher", len(tokenizer), 2)
    phases = cast(DevicePhases, asked)
    hints = hints_of(KEYS, tokenizer)
    run = SelfTeacher(hints, student.log_probs, teacher.log_probs, "reference", phases, asked.part)
    step = experience(groups, Shaping())
    found = asyncio.run(run.gains(groups, step, None))
    assert asked.roles == ["actor_train", "reference"] and student.calls == teacher.calls == [2]
    expected = np.zeros(len(step.sequences.token_ids))
    longer = "<|im_start|>user\none and one? e.g. two<|im_end|>\n<|im_start|>assistant\n"
    for row in (1, 2):
        own = slice(step.sequences.offsets[row], step.sequences.offsets[row + 1])
        response = groups[0].episodes[row].sampled[0].token_ids.tolist()
        prompt = groups[0].prompt.token_ids.tolist()
        by_teacher = teacher.exact(tokenizer(longer)["input_ids"], response)
        expected[own][-len(response) :] = np.subtract(by_teacher, student.exact(prompt, response))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found.gains, expected, atol=2e-5)
    assert found.taught.tolist() == (expected != 0).tolist()
    assert found.metrics["self_distillation/taught_fraction"] == pytest.approx(2 / 6)
    assert found.metrics["self_distillation/without_hint_fraction"] == pytest.approx(4 / 6)
    mean = found.gains[found.taught].mean()
    assert found.metrics["self_distillation/gain_mean"] == pytest.approx(float(mean))
    batch, metrics = CreditAssignment(Credit("grpo", Normalisation(), teacher_weight=1.0))(step, None, taught=found)
    np.testing.assert_array_equal(batch.advantages, found.gains)
    assert batch.proximal_log_probs is None, "the loss keeps its own old log-probs"
    assert metrics["advantage/zero_fraction"] == pytest.approx(4 / 6)
    assert metrics["self_distillation/taught_fraction"] == pytest.approx(2 / 6)


def test_known_log_probs_are_not_computed_again(
    groups: list[RolloutGroup],
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
    tmp_path: Path,
) -> None:
    asked, policy = Asked(), Policy(tmp_path, len(tokenizer), 1)
    step, trainer = experience(groups, Shaping()), cast(Any, policy)
    run = self_teacher_of(hints_of(KEYS, tokenizer), trainer, trainer, cast(DevicePhases, asked), asked.part)
    assert run is not None
    own = asyncio.run(policy.log_probs(step.sequences))
    found = asyncio.run(run.gains(groups, step, own))
    assert policy.calls == [6, 2] and asked.roles == ["actor_train"]
    again = asyncio.run(run.gains(groups, step, None))
    np.testing.assert_allclose(found.gains, again.gains, atol=1e-5)


class Roles:
    """Stands in for `actor_train` and the reference, and returns the name of what is called."""

    def __init__(self, name: str) -> None:
        self.log_probs, self.ref_log_probs, self.averaged_log_probs = f"{name}", f"{name} alone", f"{name} averaged"


@pytest.mark.parametrize(
    ("teacher", "apart", "expected"),
    [
        ("live", True, ("actor_train", "policy")),
        ("averaged", True, ("actor_train", "policy averaged")),
        ("frozen", False, ("actor_train", "policy alone")),
        ("frozen", True, ("reference", "reference alone")),
    ],
)
def test_teacher_chooses_the_weights(
    teacher: str,
    apart: bool,
    expected: tuple[str, str],
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
) -> None:
    keys = SelfDistillationConfig.model_validate({"sees": ["success"], "teacher": teacher})
    policy: Any = Roles("policy")
    reference: Any = Roles("reference") if apart else policy
    run = self_teacher_of(hints_of(keys, tokenizer), policy, reference, cast(Any, None), Asked().part)
    assert run is not None and (run.teacher_role, run.teacher) == expected and cast(Any, run.student) == "policy"


@pytest.mark.parametrize(
    ("most", "sees", "share"),
    [(5, ["success"], "too_long_fraction"), (90, ["feedback"], "without_hint_fraction")],
)
def test_step_without_teaching_calls_no_model(
    most: int,
    sees: list[str],
    share: str,
    groups: list[RolloutGroup],
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
) -> None:
    asked, absent = Asked(), cast(Any, None)
    keys = SelfDistillationConfig.model_validate({"sees": sees})
    run = SelfTeacher(hints_of(keys, tokenizer, most), absent, absent, "actor_train", cast(Any, asked), asked.part)
    step = experience(groups[:1], Shaping())
    found = asyncio.run(run.gains(groups[:1], step, None))
    assert not found.gains.any() and not found.taught.any() and not asked.roles
    assert found.metrics[f"self_distillation/{share}"] == pytest.approx(1 if sees == ["feedback"] else 2 / 3)
    assert found.metrics["self_distillation/taught_fraction"] == 0


def config_of(keys: dict[str, Any], rows: DataConfig) -> RlvrConfig:
    own = SelfDistillationConfig.model_validate(keys)
    stand_in = SimpleNamespace(self_distillation=own, prompt_length=20, response_length=10)
    stand_in.actor_train = SimpleNamespace(data_args=rows)
    return cast(RlvrConfig, stand_in)


REFUSED: list[tuple[dict[str, Any], list[dict[str, Any]], str, FaultCode]] = [
    ({"sees": ["solution"], "solution_column": "proof"}, [{}, {}], "solution_column", "unknown_name"),
    ({"sees": ["solution"]}, [{"ground_truth": "1"}, {"ground_truth": ["1"]}], "rows.jsonl:2", "wrong_type"),
    ({"sees": ["feedback"]}, [{"tag": "style"}], "rewards.style.passes_at", "missing"),
]


@pytest.mark.parametrize(("keys", "rows", "place", "code"), REFUSED)
def test_hints_that_no_row_has_are_refused(
    keys: dict[str, Any],
    rows: list[dict[str, Any]],
    place: str,
    code: FaultCode,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"question": "one?", **row}) for row in rows))
    data_args = ROWS.model_copy(update={"file_name": str(file)})
    domain = rows[0].get("tag", "sums")
    sections = {domain: RewardConfig.model_validate({})}
    prompts = prepare_prompts(data_args, tokenizer, 100, sections, tmp_path / "cache")
    bars = {domain: () if domain == "style" else USUAL}
    with pytest.raises(BadInput) as refused:
        step_hints_of(config_of(keys, data_args), tokenizer, prompts, bars)
    [(found, where)] = coded(refused.value.faults)
    assert found == code and where.endswith(place)


def test_solution_of_some_rows_suffices(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:  # noqa: F811
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"question": "one?", "ground_truth": text}) for text in ("", "1")))
    data_args = ROWS.model_copy(update={"file_name": str(file)})
    sections = {"sums": RewardConfig.model_validate({})}
    prompts = prepare_prompts(data_args, tokenizer, 100, sections, tmp_path / "cache")
    made = step_hints_of(config_of({"sees": ["solution"]}, data_args), tokenizer, prompts, {"sums": ()})
    assert made is not None and made.most == 30
