"""RLVR with and without a critic: from the configuration to what learns and what is kept of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from roll.algorithms.value_loss import ValueLoss
from roll.config.plan.plan import Plan
from roll.config.schema.rlvr import RlvrConfig
from roll.pipeline.checkpointer import Trainer
from roll.pipeline.device_phases import DevicePhases
from roll.pipeline.learning import BothTrainers, CriticLearning, Learning
from roll.pipeline.position import Position
from roll.pipeline.wire_loss import policy_loss
from roll.types import Metrics, TrainBatch
from roll.workers.actor_train import ActorTrain
from roll.workers.critic import Critic


def learning(
    config: RlvrConfig, plan: Plan, actor_train: ActorTrain, critic: Critic | None, phases: DevicePhases
) -> Callable[[TrainBatch, Position], Awaitable[tuple[Metrics, Position]]]:
    """The updates of a step, each with what it needs on the devices."""
    loss, updates = policy_loss(config), plan.batch.updates_per_step
    if critic is None:
        return Learning(phases.training(actor_train.train_step), loss, updates)
    value_loss, warmup = ValueLoss(config.value_clip), config.critic_warmup
    if are_apart(plan):
        beside = CriticLearning(critic.train_step, value_loss, warmup, at_once=True)
        return phases.training(Learning(actor_train.train_step, loss, updates, beside), "actor_train", "critic")
    before = CriticLearning(phases.training(critic.train_step, "critic"), value_loss, warmup, at_once=False)
    return Learning(phases.training(actor_train.train_step), loss, updates, before)


def are_apart(plan: Plan) -> bool:
    """Whether policy and critic have devices of their own. Roles on the CPU share it."""
    policy, critic = plan.roles["actor_train"], plan.roles["critic"]
    return not (policy.on_cpu and critic.on_cpu) and policy.all_devices.isdisjoint(critic.all_devices)


def kept(actor_train: ActorTrain, critic: Critic | None, phases: DevicePhases) -> Trainer:
    """What goes into checkpoints and comes out of them."""
    policy = phases.trainer(actor_train)
    if critic is None:
        return policy
    return BothTrainers(policy, phases.keeping(critic.save, "critic"), phases.keeping(critic.load, "critic"))
