"""Wires the updates of an RLVR step, with and without a critic."""

from __future__ import annotations

from roll.algorithms.value_loss import ValueLoss
from roll.config.plan.plan import Plan
from roll.config.schema.rlvr import RlvrConfig
from roll.runs.device_phases import DevicePhases
from roll.runs.learning import CriticLearning, Learning
from roll.runs.rlvr.loss import learner_loss
from roll.training.actor_train import ActorTrain
from roll.training.critic import Critic


def learning(config: RlvrConfig, plan: Plan, actor_train: ActorTrain, critic: Critic | None, phases: DevicePhases) -> Learning:
    """Return the runner of a step's updates."""
    beside = None
    if critic:
        beside = CriticLearning(critic, ValueLoss(config.value_clip), config.critic_warmup, at_once=are_apart(plan))
    return Learning(phases, actor_train, learner_loss(config), plan.batch.updates, beside)


def are_apart(plan: Plan) -> bool:
    """Return whether policy and critic share no device. Two roles on the CPU share it."""
    policy, critic = plan.roles["actor_train"], plan.roles["critic"]
    return not (policy.on_cpu and critic.on_cpu) and policy.all_devices.isdisjoint(critic.all_devices)
