"""Training FLOPs and settings of roles, and the roles that a restart ends."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.models import SHAPES, build_config
from roll.config.derived.model_shape import ModelShape, shape_of
from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.config.schema.model import ModelConfig
from roll.errors import WorkerDied
from roll.models.flops import TrainingFlops
from roll.models.load import load_policy
from roll.models.value import load_scores
from roll.ray.cluster import ClusterSession
from roll.runs import roles
from roll.runs.role_models import training_flops
from roll.runs.roles import Roles
from roll.training.actor_train import TrainShape
from roll.training.deepspeed import settings as deepspeed
from roll.training.deepspeed.settings import TrainSettings

HEAD = SHAPES["7b"]["vocab_size"] * SHAPES["7b"]["hidden_size"]


@pytest.fixture(scope="module")
def seven_billion() -> ModelShape:
    shape = shape_of(build_config("7b").to_dict())
    assert shape
    return shape


def model_args(**keys: object) -> ModelConfig:
    return ModelConfig.model_validate({"dtype": "bf16", **keys})


def test_all_parameters_learn_or_the_adapter_alone(seven_billion: ModelShape) -> None:
    count = seven_billion.parameters
    assert training_flops(seven_billion, model_args(), load_policy) == TrainingFlops(count, count, 4 * 28 * 3584)
    adapter = 28 * 8 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    adapted = training_flops(seven_billion, model_args(lora_target="all-linear", lora_rank=8), load_policy)
    assert adapted == TrainingFlops(count + adapter, adapter, 4 * 28 * 3584)


def test_reward_model_head_has_one_output(seven_billion: ModelShape) -> None:
    found = training_flops(seven_billion, model_args(), load_scores)
    assert found and found.parameters == found.trained == seven_billion.parameters - HEAD + SHAPES["7b"]["hidden_size"]


def test_fp32_training_reports_no_flop_utilisation(seven_billion: ModelShape) -> None:
    assert training_flops(seven_billion, model_args(dtype="fp32"), load_policy) is None


class Group:
    """Stands in for `WorkerGroup`, and records starts and ends."""

    log: ClassVar[list[str]] = []
    die: ClassVar[set[str]] = set()
    """Names of the roles whose process dies during the start."""

    def __init__(self, role: str) -> None:
        self.role = role

    @classmethod
    def of(cls, config: object, plan: object, session: object, role: str, *_: object) -> Group:
        """Stands in for `new_group`."""
        return cls(role)

    def __len__(self) -> int:
        return 1

    async def start(self, *_: object) -> None:
        self.log.append(f"{self.role} starts")
        if self.role in self.die:
            raise WorkerDied(self.role, 0, "the process died")

    async def stop(self, seconds: float) -> None:
        self.log.append(f"{self.role} {'closes' if seconds else 'is killed'}")


class SlowGroup(Group):
    """Starts only after others had time to begin."""

    async def start(self, *given: object) -> None:
        await super().start(*given)
        await asyncio.sleep(0.1)
        self.log.append(f"{self.role} has started")


def loaded(experiment: str, output: Path, model: Path, *keys: str) -> Any:
    """Return the configuration of a shipped experiment with another model and with lengths that this model supports."""
    found: list[Any] = []
    lengths = ("prompt_length=16", "response_length=16")
    words = ["--config-name", experiment, f"output_dir={output}", f"pretrain={model}", "dry_run=true", *lengths, *keys]
    compose(words, lambda composed, presets: found.append(checked_config(composed, presets)))
    return found[0]


@pytest.mark.parametrize(("experiment", "shares"), [("gsm8k_rlvr", True), ("tiny/tiny_rlvr_lora_zero3", False)])
def test_a_trainer_knows_whether_it_shares_its_devices(
    experiment: str, shares: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, settings = loaded(experiment, tmp_path, tiny_model), list[TrainSettings]()
    monkeypatch.setattr(roles, "new_group", Group.of)
    monkeypatch.setattr(deepspeed, "TrainSettings", lambda *given: settings.append(TrainSettings(*given)))

    async def run() -> None:
        async with AsyncExitStack() as stack:
            found = Roles(config, make_plan(config), ClusterSession(tmp_path, tmp_path, tmp_path), stack)
            found.actor_train("actor_train", config.actor_train, 1, 1.0)

    asyncio.run(run())
    assert [given.takes_turns for given in settings] == [shares]


def test_a_schedule_spans_steps_times_updates_times_epochs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("ppo_epochs=3", "loss_agg_mode=seq-mean-token-sum-norm", "loss_scale_factor=5")
    config, settings, shapes = (
        loaded("tiny/tiny_rlvr_lora_zero3", tmp_path, tiny_model, *words),
        list[TrainSettings](),
        list[TrainShape](),
    )
    monkeypatch.setattr(roles, "new_group", Group.of)
    monkeypatch.setattr(deepspeed, "TrainSettings", lambda *given: settings.append(TrainSettings(*given)))
    monkeypatch.setattr(roles, "ActorTrain", lambda _, shape, *__: shapes.append(shape))

    async def run() -> None:
        async with AsyncExitStack() as stack:
            found = Roles(config, make_plan(config), ClusterSession(tmp_path, tmp_path, tmp_path), stack)
            found.actor_train("actor_train", config.actor_train, 7, 1.0)

    asyncio.run(run())
    [shape] = shapes
    # 512 sequences per step, 128 per rank and update, 2 ranks: 2 updates.
    assert (shape.updates, shape.epochs, settings[0].total_updates) == (2, 3, 7 * 2 * 3)
    assert (shape.loss_agg_mode, shape.loss_scale) == ("seq-mean-token-sum-norm", 5)


async def begun(found: Roles, config: Any) -> list[str]:
    """Request the roles as a loop does, start them, and return the roles that were started."""
    Group.log.clear()
    found.actor_train("actor_train", config.actor_train, 1, 1.0)
    found.actor_infer(config)
    found.reference(config, 1.0)
    found.rewards(config, {})
    await found.start()
    return sorted(Group.log)


async def ended(found: Roles) -> list[str]:
    """End the trainer's side, and return the roles that were ended."""
    Group.log.clear()
    await found.end_trainer_side()
    return sorted(Group.log)


def test_trainer_restart_keeps_engines_unless_unsettled(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = loaded("tiny/tiny_rlvr_lora_zero3", tmp_path, tiny_model)
    monkeypatch.setattr(roles, "new_group", Group.of)
    monkeypatch.setattr(Group, "log", [])

    async def run() -> None:
        async with AsyncExitStack() as stack:
            found = Roles(config, make_plan(config), ClusterSession(tmp_path, tmp_path, tmp_path), stack)

            begin, end = partial(begun, found, config), partial(ended, found)

            async def settle(whole: bool) -> bool:
                return whole

            assert not found.have_started
            engines, reward = ["actor_infer starts"], ["rewards.arithmetic starts"]
            trainer = ["actor_train starts", "reference starts"]
            assert await begin() == [*engines, *trainer, *reward] and found.have_started
            assert await begin() == []
            with found.unsettled("actor_infer"):
                pass
            assert await end() == ["actor_train is killed", "reference is killed"]
            assert list(found.groups) == ["actor_infer"]
            assert await begin() == trainer
            with pytest.raises(WorkerDied), found.unsettled("actor_infer"):
                raise WorkerDied("actor_train", 0, "the process died")
            assert await end() == ["actor_infer is killed", "actor_train is killed", "reference is killed"]
            assert await begin() == [*engines, *trainer]
            assert await end() == ["actor_train is killed", "reference is killed"], (
                "ending actor_infer also clears its unsettled state"
            )
            for whole in (True, False):
                await begin()
                with pytest.raises(WorkerDied), found.unsettled("actor_infer", partial(settle, whole)):
                    raise WorkerDied("actor_train", 0, "the process died")
                assert ("actor_infer is killed" in await end()) is not whole
            with found.unsettled("actor_infer"):
                pass
            await begin()
            with pytest.raises(WorkerDied), found.unsettled("actor_infer"):
                raise WorkerDied("actor_train", 0, "the process died")
            await end()
            Group.die = {"actor_infer"}
            with pytest.raises(WorkerDied):
                await begin()
            Group.die = set()
            assert "actor_infer is killed" in await end() and not found.are_running
            assert "actor_infer starts" in await begin() and found.are_running

    asyncio.run(run())


@pytest.mark.parametrize("cache", [None, 2**30])
def test_engines_of_fixed_size_start_beside_the_trainer(
    cache: int | None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "+actor_infer.strategy_args.strategy_config.engine_args.kv_cache_memory_bytes"
    words = ["time_sharing=false", *([f"{key}={cache}"] if cache else [])]
    config = loaded("gsm8k_rlvr", tmp_path, tiny_model, *words)
    monkeypatch.setattr(roles, "new_group", SlowGroup.of)
    monkeypatch.setattr(Group, "log", [])

    async def run() -> None:
        async with AsyncExitStack() as stack:
            found = Roles(config, make_plan(config), ClusterSession(tmp_path, tmp_path, tmp_path), stack)
            found.actor_train("actor_train", config.actor_train, 1, 1.0)
            found.actor_infer(config)
            await found.start()

    asyncio.run(run())
    first = ["actor_infer starts", "actor_infer has started", "actor_train starts"]
    assert (Group.log[:3] == first) is (cache is None)
    assert ("actor_train starts" in Group.log[:2]) is (cache is not None)


@pytest.mark.parametrize(("is_lost", "how"), [(False, "closes"), (True, "is killed")])
def test_groups_are_killed_without_waits_after_head_loss(
    is_lost: bool, how: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = loaded("tiny/tiny_rlvr_lora_zero3", tmp_path, tiny_model)
    monkeypatch.setattr(roles, "new_group", Group.of)
    monkeypatch.setattr(Group, "log", [])

    async def run() -> None:
        session = ClusterSession(tmp_path, tmp_path, tmp_path)
        async with AsyncExitStack() as stack:
            await begun(Roles(config, make_plan(config), session, stack), config)
            Group.log.clear()
            if is_lost:
                session.is_lost.set()

    asyncio.run(run())
    assert sorted(Group.log) == [
        f"{role} {how}" for role in ("actor_infer", "actor_train", "reference", "rewards.arithmetic")
    ]
