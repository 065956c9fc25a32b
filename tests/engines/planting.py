"""Code that `test_finite.py` runs on each rank: inject a non-finite value into an update, and compare checkpoints
before and after.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.losses import Loss, LossInputs, TokenLosses
from roll.backend import MicroBatch, Rank
from roll.config.schema.model import TrainingConfig
from roll.training.deepspeed.settings import DeepSpeedConfig
from tests.engines import training
from tests.engines.training import LOSS, SEED, TEMPERATURE, VERSION, Updates

PLANTS = ("loss", "infinite_loss", "gradient", "embedding")
COUNTERS = (
    "skipped_steps",
    "global_steps",
    "global_samples",
    "micro_steps",
    "overflow",
    "loss_scaler",
    "dynamic_loss_scale",
    "cur_scale",
)
"""Keys of DeepSpeed's checkpoints that a skipped update may change: counters of attempted steps, and the state of the
loss scaler.
"""
COUNTERS += ("last_overflow_iter", "cur_iter", "ds_config")


@dataclass(frozen=True)
class Plan:
    """A training configuration, including where its states are kept."""

    stage: int
    dtype: str
    lora: bool = False
    offload: str = "none"
    """The states that DeepSpeed offloads to host memory: `none`, `optimizer` or `all`."""

    @property
    def name(self) -> str:
        """Name of the plan in pytest's report and of its folder."""
        parts = [f"ZeRO-{self.stage}", self.dtype, "LoRA" if self.lora else "full"]
        return "_".join(parts + [f"offload_{self.offload}"] * (self.offload != "none"))


@dataclass(frozen=True)
class Skip:
    """The outcome of an update with an injected fault, on one rank."""

    skipped: float
    differences: list[str]
    """Differences between the checkpoints before and after; rank 0 only."""
    said: str
    """The line in the log; rank 0 only."""


@dataclass(frozen=True)
class Faults:
    """The results of a plan on one rank."""

    skips: dict[str, Skip]
    afterwards: list[str]
    """Differences from a run without faults, after one more good update in both runs."""
    moved: int
    """Number of differences between the checkpoints after the first and after the second good update."""
    scales: list[float | None]
    """Loss scale of fp16 after the first good update and after each fault; None for other dtypes."""
    rates: list[float]
    """Learning rates of the first good update and of each update with a fault."""
    end: str
    """The error that ends a run with several consecutive faults."""


@dataclass(frozen=True)
class PlantedLoss(Loss):
    """The loss of the test, with a fault in the micro-batch that has a selected token."""

    plant: str
    loss: Loss = LOSS

    def __call__(self, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenLosses:
        said = self.loss(log_probs, entropy, inputs)
        if inputs.token_selection is None or not inputs.token_selection.any():
            return said
        if self.plant == "loss":
            losses = said.losses * torch.nan
        elif self.plant == "infinite_loss":  # its gradient is finite
            losses = said.losses + torch.inf
        else:  # sqrt at 0: the loss is finite, but its gradient is 0 times infinity
            losses = said.losses + (log_probs * 0).abs().sqrt()
        return TokenLosses(losses, said.metrics)


def settings(plan: Plan, model: Path, **training_args: Any) -> Any:
    """Return the `TrainSettings` of a plan."""
    zero: dict[str, Any] = dict(training.ZERO[plan.stage])
    if plan.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if plan.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    out = training.settings(training.Case(plan.stage, plan.lora, plan.dtype), model, SEED)
    config = DeepSpeedConfig.model_validate({"zero_optimization": zero, "fp16": {"initial_scale_power": 8}})
    arguments = TrainingConfig.model_validate(out.training.model_dump(exclude_unset=True) | training_args)
    return dataclasses.replace(out, deepspeed=config, training=arguments)


@contextmanager
def nan_rows(strategy: Any, on: bool) -> Iterator[None]:
    """If `on`, make the input embedding return NaN for the first token of the update's second micro-batch."""
    calls = 0

    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls != 2:
            return output
        return torch.where((torch.arange(output.shape[1]) == 0)[None, :, None], torch.nan, output)

    hook = strategy._model.causal.get_input_embeddings().register_forward_hook(spoil) if on else None
    try:
        yield
    finally:
        if hook:
            hook.remove()


def with_selection(updates: Updates, number: int) -> Updates:
    """Return the updates with all response tokens of one micro-batch selected."""

    def mark(index: int, micro_batch: MicroBatch) -> MicroBatch:
        mask = micro_batch.batch.sequences.response_mask
        return dataclasses.replace(
            micro_batch, batch=dataclasses.replace(micro_batch.batch, token_selection=mask & (index == number))
        )

    return [[mark(index, micro_batch) for index, micro_batch in enumerate(update)] for update in updates]


def differences(first: Path, second: Path) -> list[str]:
    """Return the entries, except for `COUNTERS`, in which two checkpoints are not bitwise equal."""
    names = [
        sorted(str(file.relative_to(folder)) for file in folder.rglob("*_states.pt")) for folder in (first, second)
    ]
    assert names[0] == names[1] and names[0]
    out: list[str] = []
    for name in names[0]:
        out += _differ(
            name, *(torch.load(folder / name, weights_only=False, map_location="cpu") for folder in (first, second))
        )
    return out


def _differ(place: str, first: Any, second: Any) -> list[str]:
    if isinstance(first, Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        return (
            []
            if same and torch.equal(first.flatten().view(torch.uint8), second.flatten().view(torch.uint8))
            else [place]
        )
    if isinstance(first, Mapping):
        if list(first) != list(second):
            return [f"{place}: keys"]
        return [
            each for key in first if key not in COUNTERS for each in _differ(f"{place}/{key}", first[key], second[key])
        ]
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return [f"{place}: length"]
        return [
            each
            for number, (a, b) in enumerate(zip(first, second, strict=True))
            for each in _differ(f"{place}/{number}", a, b)
        ]
    return (
        [] if not isinstance(first, (int, float, str, bool)) or first == second else [f"{place}: {first} and {second}"]
    )


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def plant_all(rank: Rank, plan: Plan, model: Path, work: Sequence[Updates], folder: Path) -> Faults:
    """Inject every fault, and compare with a run without faults.

    The first run makes a good update, one update with each fault, and another good update. The second run makes the
    same two good updates without any fault in between, and then updates with faults until it ends with an error.
    """
    good, other = ([update] for update in work[rank.rank])
    log, skips = _Lines(), {}
    logging.getLogger("roll.training.deepspeed.finite").addHandler(log)

    def saved(strategy: Any, name: str) -> Path:
        strategy.save(folder / name)
        torch.distributed.barrier()
        return folder / name

    def compared(before: Path, after: Path) -> list[str]:
        found = differences(before, after) if rank.rank == 0 else []
        torch.distributed.barrier()
        return found

    with training.trainer_of(settings(plan, model), rank) as strategy:
        results = [strategy.train_step(good, LOSS, TEMPERATURE, VERSION)]
        before = saved(strategy, "before")
        for plant in PLANTS:
            log.lines.clear()
            # The fault is on rank 1 only, in its second micro-batch, or in its first for the plant "loss".
            here = with_selection(other, 0 if plant == "loss" else 1) if rank.rank == 1 else other
            with nan_rows(strategy, plant == "embedding" and rank.rank == 1):
                loss = LOSS if plant == "embedding" else PlantedLoss(plant)
                results.append(strategy.train_step(here, loss, TEMPERATURE, VERSION))
            found = compared(before, saved(strategy, plant))
            skips[plant] = Skip(results[-1].scalars["policy/skipped_updates"], found, "".join(log.lines))
        strategy.train_step(other, LOSS, TEMPERATURE, VERSION)
        went_on = saved(strategy, "went_on")
        moved = len(compared(before, went_on))
    with training.trainer_of(settings(plan, model, max_consecutive_skips=2), rank) as strategy:
        strategy.train_step(good, LOSS, TEMPERATURE, VERSION)
        strategy.train_step(other, LOSS, TEMPERATURE, VERSION)
        afterwards = compared(saved(strategy, "without"), went_on)
        here = with_selection(other, 1) if rank.rank == 1 else other
        end = ""
        try:
            strategy.train_step([*here, *good, *here, *here, *here], PlantedLoss("gradient"), TEMPERATURE, VERSION)
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
    logging.getLogger("roll.training.deepspeed.finite").removeHandler(log)
    scales = [each.scalars.get("policy/loss_scale") for each in results]
    return Faults(skips, afterwards, moved, scales, [each.scalars["policy/lr"] for each in results], end)


def plant_everywhere(
    rank: Rank, plans: Sequence[Plan], model: Path, work: Sequence[Updates], folder: Path
) -> list[Faults]:
    """Run the plans one after another. `work[rank]` contains the updates of a rank."""
    with training.fp16_on_any_cpu():
        out = [plant_all(rank, plan, model, work, folder / plan.name) for plan in plans]
    torch.distributed.destroy_process_group()
    return out
