"""From a role's keys to a started group of workers behind its facade."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from roll.config.checks.deepspeed import deepspeed_config, swap_paths
from roll.config.derived.batch import sequences_per_update
from roll.config.derived.model_shape import config_file, read_shape
from roll.config.derived.placement import neighbours, sends_adapter
from roll.config.plan.plan import Plan
from roll.config.schema.engine import DeepSpeedInferStrategyConfig, DeepSpeedTrainStrategyConfig, VllmStrategyConfig
from roll.config.schema.model import ModelConfig
from roll.config.schema.offline import DistillConfig, SftConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ActorTrainConfig, CriticConfig, ExperimentConfig, LearnerConfig, ReferenceConfig, RoleConfig
from roll.models.load import load_tokenizer
from roll.models.student import PackedStudent, PackedTeacher
from roll.models.vocabulary import check_same_vocabulary
from roll.strategies.base import Rank
from roll.system.own_folder import remove_ownerless
from roll.workers.actor_infer import ActorInfer
from roll.workers.actor_train import ActorTrain, TrainShape
from roll.workers.cluster import RECORD, ClusterSession
from roll.workers.critic import Critic
from roll.workers.device_sharing import ColocatedRole, DeviceSharing, lines
from roll.workers.group import WorkerGroup
from roll.workers.placement import worker_placements
from roll.workers.process import Factory
from roll.workers.rewards import Rewards, RewardWorker
from roll.workers.scoring import Reference


class Roles:
    """Starts a run's groups and ends them all when the run ends, however it ends."""

    def __init__(self, config: Config, plan: Plan, session: ClusterSession, stack: AsyncExitStack) -> None:
        self._config, self._plan, self._session, self._stack = config, plan, session, stack
        self._starts: dict[str, Callable[[], Awaitable[None]]] = {}
        self._colocated: dict[str, ColocatedRole] = {}
        self.groups: dict[str, WorkerGroup] = {}

    def actor_train(self, name: str, role: ActorTrainConfig, steps: int, temperature: float, factory: Factory | None = None) -> ActorTrain:
        """What is to be exported and learns in so many steps: a policy, or what `factory` makes."""
        config = self._config
        group, shape = self._learner(name, role, factory or make_train, steps)
        scale = isinstance(config, RlvrConfig) and config.loss_scale_factor or config.response_length
        shape = replace(shape, loss_agg_mode=aggregation(config), loss_scale=scale, temperature=temperature)
        limits = config.deadlines
        actor_train = self._colocated[name] = ActorTrain(
            group, shape, self._session.shared_memory, limits.train, limits.weight_sync, limits.checkpoint
        )
        return actor_train

    def critic(self, role: CriticConfig, steps: int) -> Critic:
        """The value function, which learns in every one of so many steps."""
        group, shape = self._learner("critic", role, make_critic, steps)
        limits = self._config.deadlines
        critic = self._colocated["critic"] = Critic(group, shape, limits.train, limits.weight_sync, limits.checkpoint)
        return critic

    def _learner(self, name: str, role: LearnerConfig, factory: Factory, steps: int) -> tuple[WorkerGroup, TrainShape]:
        """A group that learns in so many steps, and how a step's sequences become its updates."""
        config = self._config
        strategy, path = role.strategy_args, model_path(config, role.model_args)
        assert isinstance(strategy, DeepSpeedTrainStrategyConfig)
        shape = TrainShape(
            updates=self._plan.batch.sequences_per_step // sequences_per_update(role),
            epochs=config.ppo_epochs if isinstance(config, RlvrConfig) else 1,
            token_budget=self._token_budget(name),
            loss_agg_mode="token-mean",
            temperature=1.0,
            attention_cost=attention_cost(path),
        )
        settings = {
            "model_path": path,
            "model_args": role.model_args,
            "training": role.training_args,
            "deepspeed": strategy.strategy_config,
            "max_grad_norm": config.max_grad_norm,
            "total_updates": steps * shape.updates * shape.epochs,
            "token_budget": shape.token_budget,
            "seed": config.seed,
        }
        return self._group(name, role, factory, settings, blocking=True), shape

    def actor_infer(self, config: RlvrConfig) -> ActorInfer:
        """The group that generates."""
        role = config.actor_infer
        settings: dict[str, Any] = {"model_path": model_path(config, role.model_args), "model_args": role.model_args}
        if isinstance(role.strategy_args, VllmStrategyConfig):
            engine = role.strategy_args.strategy_config
            settings |= {
                "engine": engine,
                "max_model_len": engine.max_model_len or config.prompt_length + config.response_length,
                "adapter_rank": config.actor_train.model_args.lora_rank if sends_adapter(config) else None,
                "seed": config.seed,
                "spans_updates": config.async_generation_ratio > 0,
                "takes_turns": "actor_infer" in self._plan.turns,
            }
            group = self._group("actor_infer", role, make_vllm, settings, blocking=False)
        else:
            group = self._group("actor_infer", role, make_hf_generate, settings, blocking=False)
        actor_infer = self._colocated["actor_infer"] = ActorInfer(group, config.deadlines.rollout, config.deadlines.weight_sync)
        return actor_infer

    def reference(self, config: RlvrConfig, temperature: float) -> Reference:
        """The group whose policy stays as it was."""
        assert config.reference is not None
        return self.score("reference", config.reference, temperature)

    def teacher(self, role: ReferenceConfig) -> Reference:
        """The group that a student learns from."""
        return self.score("teacher", role, 1.0, {"wrap": PackedTeacher})

    def score(self, name: str, role: ReferenceConfig, temperature: float, more: Mapping[str, Any] | None = None) -> Reference:
        """A group that says what a model that does not change makes of given sequences; `more` is for its strategy's settings."""
        config = self._config
        settings: dict[str, Any] = {"model_path": model_path(config, role.model_args), "model_args": role.model_args, **(more or {})}
        if isinstance(role.strategy_args, DeepSpeedInferStrategyConfig):
            settings["deepspeed"] = role.strategy_args.strategy_config
            group = self._group(name, role, make_sharded_score, settings, blocking=True)
        else:
            group = self._group(name, role, make_hf_score, settings, blocking=True)
        limits = config.deadlines
        scorer = Reference(group, self._token_budget(name), temperature, limits.train, limits.weight_sync)
        self._colocated[name] = scorer
        return scorer

    async def end(self, name: str) -> None:
        """End a group that is not needed any more, and give its memory back."""
        await self.groups.pop(name).stop(self._config.deadlines.shutdown)

    def rewards(self, config: RlvrConfig) -> Rewards:
        """The reward workers of every domain."""
        groups = {}
        for domain, section in config.rewards.items():
            name = f"rewards.{domain}"
            group = self._new_group(name, section.system_envs, blocking=False)
            limits = config.deadlines
            settings = [(domain, section, limits.start)] * len(group)
            self._starts[name] = partial(group.start, RewardWorker, settings, limits.train, limits.start)
            groups[domain] = group
        return Rewards(groups, config.rewards)

    async def start(self) -> DeviceSharing:
        """Start every group that was asked for; the first failure ends them all.

        Groups that share devices start one after the other, engines first: vLLM plans with the memory that is free when it
        starts. Those that take turns are offloaded before the next one starts.
        """
        sharing = DeviceSharing(self._plan.turns)
        engines = [name for name, role in self._plan.roles.items() if role.strategy == "vllm"]
        waiting = lines(list(self._starts), neighbours(self._plan.roles), engines)
        tasks = [asyncio.ensure_future(self._start_line(line, sharing)) for line in waiting]
        try:
            await asyncio.gather(*tasks)
            return sharing
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_line(self, names: Sequence[str], sharing: DeviceSharing) -> None:
        for name in names:
            await self._starts[name]()
            if name in self._colocated:
                await sharing.enter(name, self._colocated[name])

    def _group(self, name: str, role: RoleConfig, factory: Factory, settings: Any, blocking: bool) -> WorkerGroup:
        deepspeed = deepspeed_config(role)
        for path in swap_paths(deepspeed).values() if deepspeed else ():  # called when the group has ended: a rank may have been killed
            self._stack.callback(remove_ownerless, path)
        group = self._new_group(name, role.system_envs, blocking)
        limits = self._config.deadlines
        self._starts[name] = partial(group.start, factory, [settings] * len(group), limits.collective or limits.train, limits.start)
        self.groups[name] = group
        return group

    def _new_group(self, name: str, system_envs: Mapping[str, str], blocking: bool) -> WorkerGroup:
        environment = {"TMPDIR": str(self._session.scratch)} | worker_environment(self._plan, self._config, system_envs)
        places = worker_placements(self._plan.roles[name], self._config.num_gpus_per_node, environment)
        record, replica_size = self._session.shared_memory / f"{name}{RECORD}", self._plan.roles[name].replica_size
        group = WorkerGroup(name, places, self._session.logs, record, blocking, replica_size)
        self._stack.push_async_callback(group.stop, self._config.deadlines.shutdown)
        return group

    def _token_budget(self, name: str) -> int:
        budget = self._plan.roles[name].tokens_per_microbatch
        assert budget is not None
        return budget


def worker_environment(plan: Plan, config: ExperimentConfig, own: Mapping[str, str]) -> dict[str, str]:
    """What is set for a process of a role: the role's own `system_envs` hold, then the root's, then `.deepspeed_env`."""
    return {**plan.environment, **config.system_envs, **own}


def aggregation(config: Config) -> str:
    """How token losses become one number: likelihoods token by token, what is compared sequence by sequence."""
    if isinstance(config, RlvrConfig):
        return config.loss_agg_mode
    return "token-mean" if isinstance(config, SftConfig | DistillConfig) else "seq-mean-token-mean"


def model_path(config: ExperimentConfig, model_args: ModelConfig) -> str:
    """The folder, absolute since workers may start elsewhere, or the Hub name of a role's model."""
    name = model_args.model_name_or_path or config.pretrain
    return str(Path(name).absolute()) if Path(name).exists() else name


def check_same_tokens(config: Config, ours: ModelConfig, other: ModelConfig, role: str) -> None:
    """Whether the model of `role` can be asked about the tokens of the model that learns.

    Raises:
        DataError: a tokenizer cannot be read, or the two give other numbers to the same tokens.
    """
    learner, asked = (load_tokenizer(model_path(config, one), one.trust_remote_code) for one in (ours, other))
    check_same_vocabulary(learner, asked, f"{role}.model_args.model_name_or_path")


def attention_cost(model: str) -> float:
    """See `ModelShape`; 0 for a model whose shape is not known on this machine."""
    file = config_file(model)
    shape = read_shape(file) if file else None
    return shape.attention_cost if shape else 0.0


# The strategies' modules bring their engines; each is imported in the process that runs it, and in no other.


def make_train(settings: dict[str, Any], rank: Rank) -> Any:
    """A `DeepSpeedTrain`."""
    from roll.strategies.deepspeed_train import DeepSpeedTrain, TrainSettings

    return DeepSpeedTrain(TrainSettings(**settings), rank)


def make_critic(settings: dict[str, Any], rank: Rank) -> Any:
    """A `DeepSpeedTrain` of a model with a value head."""
    from roll.models.value import load_values
    from roll.strategies.deepspeed_train import DeepSpeedTrain, TrainSettings

    return DeepSpeedTrain(TrainSettings(**settings, load=load_values), rank)


def make_scores(settings: dict[str, Any], rank: Rank) -> Any:
    """A `DeepSpeedTrain` of a reward model."""
    from roll.models.score import load_scores
    from roll.strategies.deepspeed_train import DeepSpeedTrain, TrainSettings

    return DeepSpeedTrain(TrainSettings(**settings, load=load_scores), rank)


def make_student(load: Callable[[str, ModelConfig, int], PackedStudent], settings: dict[str, Any], rank: Rank) -> Any:
    """A `DeepSpeedTrain` of a policy that learns from a teacher."""
    from roll.strategies.deepspeed_train import DeepSpeedTrain, TrainSettings

    return DeepSpeedTrain(TrainSettings(**settings, load=load), rank)


def make_vllm(settings: dict[str, Any], rank: Rank) -> Any:
    """A `VllmGenerate`."""
    from roll.strategies.vllm import VllmGenerate, VllmSettings

    return VllmGenerate(VllmSettings(**settings), rank)


def make_hf_generate(settings: dict[str, Any], rank: Rank) -> Any:
    """An `HfGenerate`."""
    from roll.strategies.hf_infer import HfGenerate, HfSettings

    return HfGenerate(HfSettings(**settings), rank)


def make_hf_score(settings: dict[str, Any], rank: Rank) -> Any:
    """An `HfScore`."""
    from roll.strategies.hf_infer import HfScore, HfSettings

    return HfScore(HfSettings(**settings), rank)


def make_sharded_score(settings: dict[str, Any], rank: Rank) -> Any:
    """A `DeepSpeedScore`."""
    from roll.strategies.deepspeed_infer import DeepSpeedScore, ShardedScoreSettings

    return DeepSpeedScore(ShardedScoreSettings(**settings), rank)
