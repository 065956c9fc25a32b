"""Parameter groups, optimizers in one process compared with formulas in float64, and the learning-rate schedules of
transformers and DeepSpeed.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, get_args

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType

from roll.backend import Rank
from roll.config.schema.foreign_names import DEEPSPEED_SCHEDULES, REMOVED_OPTIMIZERS
from roll.config.schema.model import TrainingConfig
from roll.errors import ConfigError
from roll.training.deepspeed import setup
from roll.training.deepspeed.checks import BY_METRIC, NEEDED, SCHEDULES
from roll.training.deepspeed.setup import (
    OPTIMIZERS,
    Place,
    make_optimizer,
    make_schedule,
    parameter_groups,
    runs_of,
)
from tests import limits

RANK = Rank("actor_train", 0, 1, "127.0.0.1", 0, "cpu", limits.START)
USUAL = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "num_stable_steps"}


def arguments(**keys: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(keys)


class Model(nn.Module):
    """A matrix, a vector, an adapter, an embedding and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 3)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.embed = nn.Embedding(5, 4)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None


def grouped(model: Model, training: TrainingConfig) -> dict[tuple[float, float], set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, training)
    return {
        (group["lr"], group["weight_decay"]): {names[id(parameter)] for parameter in group["params"]}
        for group in groups
    }


def test_biases_are_not_decayed_and_adapter_rates_differ() -> None:
    matrices = {"dense.weight", "lora_A.weight", "embed.weight"}
    assert grouped(Model(), arguments(learning_rate=1.0)) == {(1.0, 0.0): matrices | {"dense.bias"}}
    assert grouped(Model(), arguments(learning_rate=1.0, weight_decay=0.1)) == {
        (1.0, 0.1): matrices,
        (1.0, 0.0): {"dense.bias"},
    }
    with_own = arguments(learning_rate=1.0, weight_decay=0.1, lora_learning_rate=0.0)
    expected = {(1.0, 0.1): matrices - {"lora_A.weight"}, (1.0, 0.0): {"dense.bias"}, (0.0, 0.1): {"lora_A.weight"}}
    assert grouped(Model(), with_own) == expected


@pytest.mark.parametrize("sizes", [[3, 1, 2, 9, 1, 1], [4], [5, 5], [1] * 9, []])
def test_groups_hold_few_numbers_or_one_parameter(sizes: list[int]) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    runs = runs_of(parameters, 4)
    assert [id(each) for run in runs for each in run] == [id(each) for each in parameters]
    held = [sum(each.numel() for each in run) for run in runs]
    assert all(size <= 4 or len(run) == 1 for size, run in zip(held, runs, strict=True))
    assert all(size + run[0].numel() > 4 for size, run in zip(held, runs[1:], strict=False)), "no run could be longer"


@pytest.mark.parametrize(("stage", "count"), [(0, 1), (1, 3), (2, 3), (3, 1)])
def test_groups_are_split_where_zero_copies_their_gradients(
    stage: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "LARGEST_GROUP", 12)
    optimizer = make_optimizer(Model(), arguments(), Place(RANK, stage, offloaded=False))
    assert len(optimizer.param_groups) == count


def expected(name: str, parameter: nn.Parameter, kind: str, steps: int) -> Tensor:
    """Return a weight after `steps` with a constant gradient: learning rate 0.1, weight decay 0.2 for matrices, betas
    0.8 and 0.9.
    """
    p, g, decay = parameter.detach().double(), parameter.grad, 0.2 if parameter.ndim > 1 else 0.0
    assert g is not None
    g, first, second = g.double(), torch.zeros_like(p), torch.zeros_like(p)
    for step in range(1, steps + 1):
        if kind == "lion":
            p = p * (1 - 0.1 * decay) - 0.1 * torch.sign(0.8 * first + 0.2 * g)
            first = 0.9 * first + 0.1 * g
        elif kind == "adagrad":
            second = second + (g + decay * p) ** 2
            p = p - 0.1 * (g + decay * p) / (second.sqrt() + 1e-8)
        else:
            first, second = 0.8 * first + 0.2 * g, 0.9 * second + 0.1 * g * g
            update = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-8)
            p = p * (1 - 0.1 * decay) - 0.1 * update
    return p


@pytest.mark.parametrize("kind", ["adamw", "lion", "adagrad"])
def test_three_steps_are_the_formulas(kind: str) -> None:
    training = arguments(optimizer=kind, learning_rate=0.1, weight_decay=0.2, adam_beta1=0.8, adam_beta2=0.9)
    model = Model()
    after = {
        name: expected(name, parameter, kind, 3)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    optimizer = make_optimizer(model, training, Place(RANK, stage=0, offloaded=False))
    for _ in range(3):
        optimizer.step()
    for name, weight in after.items():
        torch.testing.assert_close(
            model.get_parameter(name).double(), weight, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert torch.equal(model.frozen, Model().frozen)


def orthogonal(gradient: Tensor) -> Tensor:
    """Apply five steps of Muon's Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon/)."""
    x = gradient / gradient.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_updates_matrices_and_adamw_the_rest() -> None:
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 12}
    model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **heads, **sizes))
    training = arguments(optimizer="muon", learning_rate=0.1, weight_decay=0.2, adam_beta1=0.8, adam_beta2=0.9)
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(2, *weight.shape, generator=generator) for name, weight in model.named_parameters()}
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    after: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if ".layers." in name and weight.ndim == 2:
            p, momentum = weight.detach().double(), torch.zeros_like(weight, dtype=torch.float64)
            for g in gradients[name].double():
                momentum = 0.95 * momentum + 0.05 * g
                update = orthogonal(0.05 * g + 0.95 * momentum) * 0.2 * math.sqrt(max(p.shape))
                p = p * (1 - 0.1 * 0.2) - 0.1 * update
            after[name] = p
    assert len(after) == 7
    rest = Qwen2ForCausalLM(model.config)
    rest.load_state_dict(model.state_dict())
    place = Place(RANK, stage=0, offloaded=False)
    optimizer = make_optimizer(model, training, place)
    adamw = make_optimizer(rest, arguments(**training.model_dump() | {"optimizer": "adamw"}), place)
    for number in range(2):
        for one in (model, rest):
            for name, weight in one.named_parameters():
                weight.grad = gradients[name][number].clone()
        if number:  # saving and loading the state changes nothing
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        adamw.step()
    for name, weight in model.named_parameters():
        if name in after:  # torch runs the iteration in bf16
            moved = torch.linalg.vector_norm(after[name] - before[name].double())
            assert torch.linalg.vector_norm(weight.detach() - after[name]) < 0.06 * moved
        else:
            torch.testing.assert_close(weight, rest.get_parameter(name), rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "lion", "adagrad", "muon"])
def test_non_finite_gradient_without_zero_changes_nothing(kind: str) -> None:
    model = Model()
    optimizer: Any = make_optimizer(
        model, arguments(optimizer=kind, learning_rate=0.1), Place(RANK, stage=0, offloaded=False)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert model.embed.weight.grad is not None
    model.embed.weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer.overflow
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.embed.weight.grad[0, 0] = 1.0
    optimizer.step()
    assert not optimizer.overflow
    assert not torch.equal(model.embed.weight, before["embed.weight"])


def test_every_name_makes_an_optimizer_or_is_refused() -> None:
    names = get_args(TrainingConfig.model_fields["optimizer"].annotation)
    assert set(names) == {*OPTIMIZERS, *REMOVED_OPTIMIZERS}
    with pytest.raises(ConfigError, match="'adamw_8bit'") as raised:
        make_optimizer(Model(), arguments(optimizer="adamw_8bit"), Place(RANK, 2, offloaded=False))
    assert [fault.code for fault in raised.value.faults] == ["not_supported"]


def test_the_schedules_are_transformers() -> None:
    names = set(get_args(TrainingConfig.model_fields["lr_scheduler_type"].annotation))
    assert names - {*DEEPSPEED_SCHEDULES} == {kind.value for kind in SchedulerType}
    assert names == {*SCHEDULES, *BY_METRIC}
    for name, known in SCHEDULES.items():
        if name in DEEPSPEED_SCHEDULES:
            takes = set(inspect.signature(getattr(lr_schedules, name)).parameters)
            assert set(known) == takes - {"optimizer", *SET, "last_batch_iteration"}, name
        else:
            takes = set(inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters)
            assert set(known) == takes - USUAL, name


SET = ("warmup_max_lr", "warmup_num_steps", "cycle_max_lr")
"""Parameters of DeepSpeed's schedules that are `learning_rate` and `warmup_steps`."""
OF_DEEPSPEED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "WarmupLR": ({"warmup_min_lr": 0.1}, {"warmup_max_lr": 2.0, "warmup_num_steps": 4}),
    "WarmupDecayLR": ({"warmup_type": "linear"}, {"warmup_max_lr": 2.0, "warmup_num_steps": 4, "total_num_steps": 10}),
    "WarmupCosineLR": ({"cos_min_ratio": 0.1}, {"warmup_num_steps": 4, "total_num_steps": 10}),
    "OneCycle": ({"cycle_min_lr": 0.1, "cycle_first_step_size": 3}, {"cycle_max_lr": 2.0}),
}
"""By schedule: `lr_scheduler_kwargs`, and what DeepSpeed's own configuration has in addition."""


def rates_of(schedule: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rates of ten updates."""
    rates = list[float]()
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("name", OF_DEEPSPEED)
def test_a_schedule_is_deepspeeds_own(name: str) -> None:
    def adam() -> torch.optim.Optimizer:
        return torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=2.0)

    keys, more = OF_DEEPSPEED[name]
    training = arguments(
        learning_rate=2.0,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=keys,
        warmup_steps=more.get("warmup_num_steps", 0),
    )
    ours, theirs = adam(), adam()
    found = rates_of(make_schedule(ours, training, 10), ours)
    expected = rates_of(getattr(lr_schedules, name)(theirs, **keys, **more), theirs)
    assert found == expected and len(set(found)) > 3
    if name == "WarmupLR":  # the first update of DeepSpeed has the smallest rate, as the second has
        by_hand = [0.1, *(0.1 + 1.9 * math.log(step) / math.log(4) for step in (1, 2, 3, 4))]
        assert found[:5] == pytest.approx(by_hand) and found[5:] == [2.0] * 5


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in DEEPSPEED_SCHEDULES])
def test_a_schedule_is_transformers_own(name: str) -> None:
    values = {"min_lr": 0.25, "min_lr_rate": 0.25, "num_decay_steps": 4}
    keys = {key: values[key] for key in NEEDED.get(name, ())[-1:]}
    parameter = nn.Parameter(torch.ones(2))
    training = arguments(learning_rate=1.0, lr_scheduler_type=name, lr_scheduler_kwargs=keys, warmup_ratio=0.3)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule, rates = make_schedule(optimizer, training, 10), []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    by_hand = {
        "linear": [0, 1 / 3, 2 / 3, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7],
        "constant": [1.0] * 10,
        "constant_with_warmup": [0, 1 / 3, 2 / 3] + [1.0] * 7,
        "cosine": [0, 1 / 3, 2 / 3] + [0.5 * (1 + math.cos(math.pi * k / 7)) for k in range(7)],
        "cosine_with_min_lr": [0, 1 / 3, 2 / 3]
        + [0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * k / 7)) for k in range(7)],
        "inverse_sqrt": [0, 1 / 3, 2 / 3] + [math.sqrt(3 / k) for k in range(3, 10)],
        "warmup_stable_decay": [0, 1 / 3, 2 / 3]
        + [1.0] * 3
        + [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)],
    }
    if name in by_hand:
        assert rates == pytest.approx(by_hand[name], abs=1e-6)
    assert max(rates) == pytest.approx(1.0) and (name == "constant" or rates[0] < 1.0)


def linear_rates(total_updates: int, **keys: Any) -> list[float]:
    """Return the learning rates of all updates of a linear schedule with peak 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    schedule, rates = (
        make_schedule(optimizer, arguments(learning_rate=1.0, lr_scheduler_type="linear", **keys), total_updates),
        [],
    )
    for _ in range(total_updates):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("keys", "warmup"),
    [
        ({}, 0),
        ({"warmup_steps": 1}, 1),
        ({"warmup_steps": 4}, 4),
        ({"warmup_ratio": 0.2}, 2),
        ({"warmup_ratio": 0.25}, 3),  # 2.5 updates, rounded up, as in transformers
        ({"warmup_ratio": 0.01}, 1),
        ({"warmup_steps": 4, "warmup_ratio": 0.2}, 4),  # the number has precedence, as in transformers
    ],
)
def test_warmup_rises_linearly_then_the_rate_falls(keys: dict[str, Any], warmup: int) -> None:
    rising = [number / warmup for number in range(warmup)]
    assert linear_rates(10, **keys) == pytest.approx(
        rising + [(10 - number) / (10 - warmup) for number in range(warmup, 10)]
    )


class Single(nn.Module):
    """One weight, at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def trained(self, gradients: list[float], **keys: Any) -> list[float]:
        """Return the weight after each update with learning rate 0.1."""
        optimizer = make_optimizer(self, arguments(learning_rate=0.1, **keys), Place(RANK, stage=0, offloaded=False))
        weights = []
        for gradient in gradients:
            self.weight.grad = torch.tensor([gradient])
            optimizer.step()
            weights.append(self.weight.item())
        return weights


def test_lions_momentum_may_outvote_a_gradient() -> None:
    # Interpolations 0.2, 0.8 * 0.1 - 0.2 * 0.3 = 0.02 and 0.8 * 0.06 - 0.2 * 0.3 = -0.012, with momenta 0.1 and 0.06
    # between them.
    assert Single().trained([1.0, -0.3, -0.3], optimizer="lion", adam_beta1=0.8, adam_beta2=0.9) == pytest.approx(
        [-0.1, -0.2, -0.1]
    )


def test_adamws_moments_follow_changing_gradients() -> None:
    # Moments 0.2 and 0.1, then 0.8 * 0.2 - 0.2 * 2 = -0.24 and 0.9 * 0.1 + 0.1 * 4 = 0.49, divided by 1 - 0.8^2 and 1 -
    # 0.9^2.
    second = -0.1 + 0.1 * (0.24 / 0.36) / math.sqrt(0.49 / 0.19)
    assert Single().trained([1.0, -2.0], optimizer="adamw", adam_beta1=0.8, adam_beta2=0.9) == pytest.approx(
        [-0.1, second], abs=1e-6
    )


@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_an_epsilon_is_the_configured_one(kind: str) -> None:
    # 0.1 / (1 + 1) at the first update with gradient 1.
    assert Single().trained([1.0], optimizer=kind, adam_epsilon=1.0) == pytest.approx([-0.05])
