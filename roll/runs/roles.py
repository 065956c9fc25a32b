"""Starts the worker groups of a run's roles, and returns facades for calling them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

from roll.agents.environment_workers import EnvironmentSettings, EnvironmentWorker, EnvironmentWorkers, ToolFailed
from roll.backend import GenerateStrategy, TeachStrategy, TrainStrategy
from roll.backend_settings import (
    GenerateBackend,
    ModelLoader,
    ModelWrapper,
    RewardBackend,
    RoleModel,
    ScoreBackend,
    Settings,
    TrainBackend,
)
from roll.config.derived.batch import longest_sequence, sequences_per_update
from roll.config.derived.domains import ENVIRONMENTS
from roll.config.derived.fixed_roles import PREFIX
from roll.config.derived.hints import average_rate
from roll.config.derived.placement import is_trainer_side, keeps_kv_cache, model_roles, neighbours, sends_adapter
from roll.config.plan.plan import Plan
from roll.config.schema.backend import BackendTraits, EngineMemory
from roll.config.schema.offline import DistillConfig, SftConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import (
    ActorTrainConfig,
    CriticConfig,
    LearnerConfig,
    ReferenceConfig,
    RewardModelRole,
    RoleConfig,
)
from roll.engines.actor_infer import ActorInfer
from roll.engines.pool import Running, running_limits
from roll.engines.servers import until_healthy
from roll.models.load import load_policy
from roll.models.packed import PackedPolicy
from roll.models.value import load_values
from roll.ray.cluster import ClusterSession
from roll.ray.device_sharing import ColocatedRole, DeviceSharing, lines, run_together
from roll.ray.group import WorkerGroup
from roll.ray.liveness import Liveness, RayNodes
from roll.rewards.judges.chat_api import ApiChat, ApiModel
from roll.rewards.judges.reward_models import ApiJudge, ApiSettings, JudgeEngines, ScorerEngines
from roll.rewards.reward_workers import ModelReward, Rewards, RewardSettings, RewardWorker
from roll.runs.early_processes import new_group
from roll.runs.model_paths import model_name, model_path
from roll.runs.role_models import model_shape, training_flops
from roll.system.own_folder import remove_ownerless
from roll.training.actor_train import ActorTrain, Critic, Reference, Teacher, TrainShape

S = TypeVar("S")
Settle = Callable[[], Awaitable[bool]]
"""Brings a role into a known state. Returns False if that is impossible."""
REPLAYING = ("actor_infer", "actor_train")
"""Roles that `router_replay` concerns: the one that returns routes, and the one that replays them."""
NONE_YET: Mapping[str, WorkerGroup[Any]] = MappingProxyType({})


class Roles:
    """Starts a run's worker groups, and ends them when the run ends for any reason.

    Roles are first requested, and then started together by `start`. If a restarted loop requests a role again, the role
    keeps its group unless that group was ended.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        session: ClusterSession,
        stack: AsyncExitStack,
        early: Mapping[str, WorkerGroup[Any]] = NONE_YET,
    ) -> None:
        """`early` are processes that have started already, by role; see `early_groups`."""
        self._config, self._plan, self._session, self._stack = config, plan, session, stack
        self._all: dict[str, WorkerGroup[Any]] = {}
        self._early = dict(early)
        self._starts: dict[str, Callable[[], Awaitable[None]]] = {}  # by role, for groups that have not started
        self._colocated: dict[str, ColocatedRole] = {}
        self._sharing = DeviceSharing(plan.turns)
        self._unsettled: dict[str, Settle | None] = {}
        self._started: set[str] = set()  # roles whose groups have started and run
        self.have_started = False
        """Whether all roles have started at least once."""
        self.are_running = False
        """Whether all roles are running; False during a restart."""
        self.groups: dict[str, WorkerGroup[object]] = {}
        self.liveness = Liveness(RayNodes())

    @property
    def all_groups(self) -> Mapping[str, WorkerGroup[Any]]:
        """Groups that are starting or running, by role, including rewards and environments."""
        return dict(self._all)

    @property
    def facades(self) -> Mapping[str, ColocatedRole]:
        """Return the facades of the roles that may share devices."""
        return self._colocated

    def actor_train(
        self,
        name: str,
        role: ActorTrainConfig,
        steps: int,
        temperature: float,
        load: ModelLoader = load_policy,
        ends: tuple[int, ...] = (),
    ) -> ActorTrain:
        """Request the role that is trained for `steps` steps and exported.

        Args:
            load: loads its model, by default a policy.
            ends: tokens that end a response, for the export's generation_config.
        """
        config = self._config
        group, shape = self._learner(name, role, load, steps, ends)
        scale = isinstance(config, RlvrConfig) and config.loss_scale_factor or config.response_length
        shape = replace(shape, loss_agg_mode=aggregation(config), loss_scale=scale, temperature=temperature)
        limits = config.deadlines
        actor_train = self._colocated[name] = ActorTrain(
            group, shape, self._session.shared_memory, limits.train, limits.weight_sync, limits.checkpoint
        )
        return actor_train

    def critic(self, role: CriticConfig, steps: int) -> Critic:
        """Request the value function, which is trained for `steps` steps."""
        group, shape = self._learner("critic", role, load_values, steps)
        limits = self._config.deadlines
        critic = self._colocated["critic"] = Critic(group, shape, limits.train, limits.weight_sync, limits.checkpoint)
        return critic

    def _learner(
        self, name: str, role: LearnerConfig, load: ModelLoader, steps: int, ends: tuple[int, ...] = ()
    ) -> tuple[WorkerGroup[TrainStrategy], TrainShape]:
        """Request a group that trains for `steps` steps. Return it, and how a step's sequences are split."""
        config = self._config
        model = model_shape(model_path(config, role.model_args), role.model_args.sees_pictures)
        shape = TrainShape(
            updates=self._plan.batch.sequences_per_step // sequences_per_update(config, role),
            epochs=config.ppo_epochs if isinstance(config, RlvrConfig) else 1,
            token_budget=self._token_budget(name),
            loss_agg_mode="token-mean",
            temperature=1.0,
            attention_cost=model.attention_cost if model else 0.0,
            flops=training_flops(model, role.model_args, load) if model else None,
        )
        settings = cast(TrainBackend, role.strategy_args).train_settings(
            self._model(name, role),
            role.training_args,
            config.max_grad_norm,
            total_updates=steps * shape.updates * shape.epochs,
            token_budget=shape.token_budget,
            load=load,
            ends=ends,
        )
        return self._group(name, role, settings, blocking=True), shape

    def progress(self, name: str) -> str:
        """Return what a role's engines are doing, as text; "" for other roles."""
        facade = self._colocated.get(name)
        return facade.progress if isinstance(facade, ActorInfer) else ""

    def actor_infer(self, config: RlvrConfig) -> ActorInfer:
        """Request the group that generates. Its facade, which tracks requests, lives as long as the processes."""
        if known := self._colocated.get("actor_infer"):
            return cast(ActorInfer, known)
        role, rank = config.actor_infer, config.actor_train.model_args.sent_rank if sends_adapter(config) else None
        context = role.strategy_args.traits.context or longest_sequence(config)
        group = self._engines("actor_infer", role, context, rank, keeps_kv_cache(config))
        may_run = running(len(group), role.strategy_args.traits, config.max_running_samples)
        limits = config.deadlines
        actor_infer = self._colocated["actor_infer"] = ActorInfer(
            group, may_run, limits.rollout, limits.weight_sync, limits.start, answering(role.strategy_args.traits)
        )
        self._stack.push_async_callback(actor_infer.close)  # closed before the group
        return actor_infer

    def fixed_engines(self, name: str, role: RoleConfig, context: int) -> tuple[JudgeEngines, int]:
        """Request the engines of a model with constant weights: a judge, or a policy that is evaluated.

        Return them with their context length in tokens: `context`, unless the engine's keys set another one.
        """
        context = role.strategy_args.traits.context or context
        if known := self._colocated.get(name):
            return cast(JudgeEngines, known), context
        group, limits = self._engines(name, role, context, None, keeps_kv_cache=True), self._config.deadlines
        may_run = running(len(group), role.strategy_args.traits)
        engines = self._colocated[name] = JudgeEngines(group, may_run, limits.rollout, limits.weight_sync, limits.start)
        self._stack.push_async_callback(engines.close)  # closed before the group
        return engines, context

    def _engines(
        self, name: str, role: RoleConfig, context: int, adapter_rank: int | None, keeps_kv_cache: bool
    ) -> WorkerGroup[GenerateStrategy]:
        backend, model = cast(GenerateBackend, role.strategy_args), self._model(name, role)
        settings = backend.generate_settings(model, context, adapter_rank, keeps_kv_cache)
        return self._group(name, role, settings, blocking=False)

    def reward_model(self, name: str, role: RewardModelRole, positions: int) -> tuple[ScorerEngines, int]:
        """Request the engines of a reward model. Return them with their context length in tokens.

        It is the one in the engine's keys if they set one, otherwise `positions`.
        """
        limits, positions = self._config.deadlines, role.strategy_args.traits.context or positions
        settings = cast(RewardBackend, role.strategy_args).reward_settings(
            self._model(name, role), positions, self._plan.roles[name].tokens_per_microbatch
        )
        group = self._group(name, role, settings, blocking=False)
        engines = self._colocated[name] = ScorerEngines(group, limits.rollout, limits.weight_sync, limits.start)
        return engines, positions

    def api_judge(self, name: str, model: ApiModel, system_envs: Mapping[str, str]) -> ApiJudge:
        """Request the process that sends requests to a judge's URL."""
        group: WorkerGroup[ApiChat] = self._known_group(name, system_envs, ApiSettings(model), blocking=False)
        return ApiJudge(group, model, self._config.deadlines.start)

    def reference(self, config: RlvrConfig, temperature: float) -> Reference:
        """Request the group with the reference policy."""
        assert config.reference is not None
        return self.score("reference", config.reference, temperature)

    def teacher(self, name: str, role: ReferenceConfig, wrap: ModelWrapper) -> Teacher:
        """Request a teacher's group. `wrap` wraps its model and determines its output."""
        group, limits = self._scorers(name, role, wrap), self._config.deadlines
        teacher = self._colocated[name] = Teacher(group, self._token_budget(name), limits.train, limits.weight_sync)
        return teacher

    def score(self, name: str, role: ReferenceConfig, temperature: float) -> Reference:
        """Request a group that computes log-probs of sequences with constant weights."""
        group, limits = self._scorers(name, role, PackedPolicy), self._config.deadlines
        scorer = self._colocated[name] = Reference(
            group, self._token_budget(name), temperature, limits.train, limits.weight_sync
        )
        return scorer

    def _scorers(self, name: str, role: RoleConfig, wrap: ModelWrapper) -> WorkerGroup[TeachStrategy]:
        settings = cast(ScoreBackend, role.strategy_args).score_settings(self._model(name, role), wrap)
        return self._group(name, role, settings, blocking=True)

    def _model(self, name: str, role: RoleConfig) -> RoleModel:
        config = self._config
        path, takes_turns = model_name(config, role.model_args), name in self._plan.turns
        replays = isinstance(config, RlvrConfig) and config.router_replay and name in REPLAYING
        rate = average_rate(config) if name == "actor_train" else None
        return RoleModel(path, role.model_args, config.seed, config.deterministic, takes_turns, replays, rate)

    async def end(self, name: str, seconds: float | None = None) -> None:
        """End a group that is no longer needed. It has `seconds` to close, by default `deadlines.shutdown`."""
        self.groups.pop(name, None)
        facade = self._colocated.pop(name, None)
        if isinstance(facade, ActorInfer):
            await facade.close()
        self._sharing.ended(name)
        self._unsettled.pop(name, None)
        self._started.discard(name)
        await self._all.pop(name).stop(self._config.deadlines.shutdown if seconds is None else seconds)

    async def _stop(self, group: WorkerGroup[Any]) -> None:
        """Stop a group at the end of the run: at once if Ray would end this process before a lost host answers."""
        await group.stop(0.0 if self._session.is_lost.is_set() else self._config.deadlines.shutdown)

    async def end_trainer_side(self) -> None:
        """Kill the trainer's groups, and any other group that is still `unsettled` or has not finished starting."""
        self.are_running = False
        for name, settle in list(self._unsettled.items()):
            if settle is not None and name in self._started and await settle():
                del self._unsettled[name]
        ending = [
            name for name in self._all if is_trainer_side(name) or name in self._unsettled or name not in self._started
        ]
        await asyncio.gather(*(self.end(name, seconds=0.0) for name in ending))

    @contextmanager
    def unsettled(self, name: str, settle: Settle | None = None) -> Iterator[None]:
        """A context in which the trainer changes a role's state. If it fails, the role is restarted as well.

        It is kept if `settle` brings it into a known state, which is called before the trainer's groups end.
        """
        self._unsettled[name] = settle
        yield
        self._unsettled.pop(name, None)

    def rewards(self, config: RlvrConfig, models: Mapping[str, ModelReward]) -> Rewards:
        """Request the reward workers of every domain that no model in `models` scores."""
        groups: dict[str, WorkerGroup[RewardWorker]] = {}
        for domain, section in config.rewards.items():
            if domain in models:
                continue
            settings = RewardSettings(domain, section, config.deadlines.start)
            groups[domain] = self._known_group(f"{PREFIX}{domain}", section.system_envs, settings, blocking=False)
        return Rewards(groups, config.rewards, config.deadlines.start, models)

    def environments(self, config: RlvrConfig, tool_failed: ToolFailed, sees: bool = False) -> EnvironmentWorkers:
        """Request the environment workers of every domain. `sees`: the policy sees pictures."""
        seconds, groups = config.deadlines.start, dict[str, WorkerGroup[EnvironmentWorker]]()
        for domain, section in config.environments.items():
            settings = EnvironmentSettings(domain, section, seconds, sees)
            groups[domain] = self._known_group(f"{ENVIRONMENTS}{domain}", section.system_envs, settings, blocking=False)
        return EnvironmentWorkers(groups, config.environments, seconds, tool_failed)

    async def start(self) -> DeviceSharing:
        """Start every requested group that is not running. The first failure cancels the other starts.

        Among groups that share devices, engines start first and one after the other, except for those that do not
        measure the free memory. Groups that take turns on the devices are offloaded before the next one starts.
        """
        # Its weights are synced before the next generation.
        await self._sharing.make_room(self._starts, discard=("actor_infer",))
        roles = model_roles(self._config)
        turns = self._plan.turns
        first = [name for name in roles if starts_first(roles[name].strategy_args.traits, name in turns)]
        waiting = lines(list(self._starts), neighbours(self._plan.roles), first, turns)
        tasks = [asyncio.ensure_future(self._start_line(line)) for line in waiting]
        try:
            await asyncio.gather(*tasks)
            self.have_started = self.are_running = True
            return self._sharing
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_line(self, line: Sequence[Sequence[str]]) -> None:
        for names in line:
            await run_together(self._start_one(name) for name in names)

    async def _start_one(self, name: str) -> None:
        await self._starts.pop(name)()
        self._started.add(name)
        if name in self._colocated:
            facade = self._colocated[name]
            if isinstance(facade, ActorInfer):
                facade.pool.begin_probes()
            await self._sharing.register(name, facade)

    def _group(self, name: str, role: RoleConfig, settings: Settings[S], blocking: bool) -> WorkerGroup[S]:
        for path in role.strategy_args.traits.swap_folders:  # called after the group's end: a killed rank leaves files
            self._stack.callback(remove_ownerless, path)
        group = self.groups[name] = self._known_group(name, role.system_envs, settings, blocking)
        self.liveness.watch(group, with_children=True)
        return group

    def _known_group(
        self, name: str, system_envs: Mapping[str, str], settings: Settings[S], blocking: bool
    ) -> WorkerGroup[S]:
        """Return the role's group if it exists, otherwise a new one for `start`."""
        if name in self._all:
            return self._all[name]
        group = self._early.pop(name, None) or new_group(
            self._config, self._plan, self._session, name, system_envs, blocking
        )
        self._all[name] = group
        limits = self._config.deadlines
        self._stack.push_async_callback(self._stop, group)
        self._starts[name] = partial(group.start, settings, limits.collective or limits.train / 2, limits.start)
        self.liveness.watch(group, with_children=False)  # child processes of a reward are the programs that it scores
        return group

    def _token_budget(self, name: str) -> int:
        budget = self._plan.roles[name].tokens_per_microbatch
        assert budget is not None
        return budget


def running(engines: int, traits: BackendTraits, most: int | None = None) -> Running:
    """Return the tracker of the engines' running samples. Its limit is `most` in total, or the engines' own limits."""
    return Running(running_limits(engines, most, traits.most_requests), engines)


def answering(traits: BackendTraits) -> Callable[[int], Awaitable[None]] | None:
    """Return the wait for an engine's server; None if the engines are in the run."""
    servers = traits.servers
    return None if servers is None else lambda engine: until_healthy(servers[engine])


def starts_first(traits: BackendTraits, takes_turns: bool) -> bool:
    """Return whether a role is an engine that measures the free memory when it starts, or one that takes turns."""
    return isinstance(traits.memory, EngineMemory) and (traits.memory.cache is None or takes_turns)


def aggregation(config: Config) -> str:
    """Return a pipeline's `loss_agg_mode`: configured for RLVR, token for SFT and distillation, else sequence."""
    if isinstance(config, RlvrConfig):
        return config.loss_agg_mode
    return "token-mean" if isinstance(config, SftConfig | DistillConfig) else "seq-mean-token-mean"
