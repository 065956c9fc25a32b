"""What the loop of RLVR requests from the roles, when it validates, and how it asks the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roll.config.plan.plan import make_plan
from roll.data.chat import NO_END, EndOfTurn
from roll.rollout.batch import Shaping
from roll.rollout.reference import ReferenceAhead, ReferenceAtOnce
from roll.runs.device_phases import untimed
from roll.runs.rlvr.validation import Validation
from roll.runs.rlvr.wiring import _loop, evaluators, reference_of


class Requested(Exception):
    """Ends the loop as soon as both trained roles are requested."""


class Roles:
    """Stands in for `Roles`, and records for how many steps each role is trained."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}

    def actor_train(self, name: str, role: object, steps: int, *_: object) -> None:
        self.steps[name] = steps

    def actor_infer(self, config: object) -> None:
        """Do nothing."""

    def reference(self, *_: object) -> None:
        """Do nothing."""

    def critic(self, role: object, steps: int) -> None:
        self.steps["critic"] = steps
        raise Requested


@pytest.mark.parametrize(("warmup", "steps"), [(0, 12), (5, 7)])
def test_the_policys_schedule_leaves_out_the_critics_warmup(
    warmup: int, steps: int, configured: Callable[..., Any]
) -> None:
    config, roles = configured("algorithms/ppo_critic", "max_steps=12", f"critic_warmup={warmup}"), Roles()
    context = cast(Any, SimpleNamespace(plan=make_plan(config)))
    with pytest.raises(Requested):
        asyncio.run(_loop(config, cast(Any, SimpleNamespace(end=NO_END)), cast(Any, roles), context, cast(Any, None)))
    assert roles.steps == {"actor_train": steps, "critic": 12}


@pytest.mark.parametrize(("eval_steps", "validated"), [(5, [0, 5, 10, 12]), (4, [0, 4, 8, 12]), (20, [0, 12]), (0, [])])
def test_validation_comes_first_regularly_and_last(eval_steps: int, validated: list[int]) -> None:
    async def nothing() -> None:
        """Do nothing."""

    async def run(keep: object) -> dict[str, float]:
        return {"val/set/pass@1": 1.0}

    phases, sync = SimpleNamespace(generation=nothing), SimpleNamespace(generating=nullcontext)
    sets, record = [SimpleNamespace(run=run)], SimpleNamespace(held_out=print)
    held_out = Validation(eval_steps, 12, *cast(Any, (sets, phases, sync, untimed, record)))
    assert [step for step in range(13) if asyncio.run(held_out.after(step))] == validated


@pytest.mark.parametrize(("most", "counts"), [(None, [3, 9]), (5, [3, 5])])
def test_each_set_has_its_rows_and_its_sampling(
    most: int | None, counts: list[int], configured: Callable[..., Any]
) -> None:
    sets = (
        "{few: {data_args: {file_name: a.jsonl, prompt: prompt}}, many: {data_args: {file_name: b.jsonl, prompt: "
        "prompt}, "
    )
    sets += "generating_args: {temperature: 0.5, max_new_tokens: 3, num_return_sequences: 2}}}"
    config = configured("tiny/tiny_rlvr_lora_zero3", "seed=7", "validation.data_args=null", f"+validation.sets={sets}")

    class Rows(list[int]):
        def prompt(self, index: int, prompt_id: int) -> tuple[int, int]:
            return self[index], prompt_id

    held_out = cast(Any, {"few": Rows(range(3)), "many": Rows(range(9))})
    few, many = evaluators(
        config, *cast(Any, [None] * 4), held_out=held_out, ends={"few": NO_END, "many": EndOfTurn((7,))}, most=most
    )
    assert [few.name, many.name] == ["few", "many"] and [few.seed, many.seed] == [7, 7]
    assert [list(cast(Any, one.prompts)) for one in (few, many)] == [[(n, n) for n in range(count)] for count in counts]
    assert (few.samples, many.samples) == (4, 2)
    assert [cast(Any, one.sampler).sampling.stop_token_ids for one in (few, many)] == [(), (7,)]
    assert (cast(Any, few.sampler).sampling.temperature, cast(Any, many.sampler).sampling.temperature) == (1.0, 0.5)
    assert (cast(Any, few.sampler).sampling.max_new_tokens, cast(Any, many.sampler).sampling.max_new_tokens) == (8, 3)


@pytest.mark.parametrize(
    ("role", "shares", "words", "kind"),
    [
        ("role", False, (), ReferenceAhead),
        ("role", True, (), ReferenceAtOnce),
        ("role", False, ("+dynamic_sampling.max_num_gen_batches=2",), ReferenceAtOnce),
        ("role", False, ("+curriculum={}",), ReferenceAhead),
        ("role", False, ("+curriculum={replay: {}}",), ReferenceAtOnce),
        ("adapter_off", False, (), ReferenceAtOnce),
    ],
)
def test_reference_works_ahead_only_on_own_devices(
    role: str, shares: bool, words: tuple[str, ...], kind: type, configured: Callable[..., Any]
) -> None:
    """Of groups that may be dropped or replaced, or of a trainer that learns, the reference is asked once per step."""
    devices = {"reference": {0}, "actor_train": {0} if shares else {1}}
    roles = {name: SimpleNamespace(all_devices=frozenset(own)) for name, own in devices.items()}
    plan = cast(Any, SimpleNamespace(reference=role, roles=roles))
    asked = cast(Any, SimpleNamespace(ref_log_probs=None))
    assert type(reference_of(configured("tiny/tiny_rlvr_lora_zero3", *words), plan, asked, Shaping())) is kind
