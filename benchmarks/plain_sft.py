"""Supervised fine-tuning without roll, on the batches of a run of roll, packed in the same way.

`deepspeed` is a plain DeepSpeed loop: the transformers model with its own loss, and one backward pass for each packed
row. `train` is torch alone, with logits in chunks, like the floor of RLVR training. Both start from the initial weights
of the run, and recompute and compile the same layers as the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from benchmarks import plain
from benchmarks.plain import LogProbs, Timer, Trainer
from benchmarks.work import SftWork
from roll.backend import MicroBatch
from roll.config.derived.batch import plan_batch
from roll.config.load.loader import checked_config
from roll.config.plan.memory import compiles
from roll.config.schema.offline import SftConfig
from roll.data.examples import ExampleSampler
from roll.models.packed import packed_inputs
from roll.runs.offline.batches import given_batch
from roll.runs.offline.wiring import prepare_rows
from roll.runs.role_models import model_shape
from roll.runs.roles import aggregation
from roll.training.actor_train import TrainShape, micro_batches_of
from roll.types import Sequences

UNLEARNT = -100
"""Label of a token without a loss, by transformers' convention."""


@dataclass(frozen=True)
class Row:
    """A micro-batch."""

    inputs: dict[str, Any]
    """Keyword arguments of a transformers model."""
    labels: Tensor
    """int64 [1, T]: token ids, or UNLEARNT. A token is predicted from the position before it."""


@dataclass(frozen=True)
class Update:
    """The data of one rank in one step."""

    rows: list[Row]
    learnt: int
    """Number of tokens in the loss, over all ranks."""


def batches(config: SftConfig, ranks: int) -> Iterator[list[list[MicroBatch]]]:
    """Yield, for each step of the run, the micro-batches of each rank."""
    rows = prepare_rows(config, "responses", learn_all=config.loss_on == "all").training
    sampler = ExampleSampler(len(rows), config.seed)
    budget = config.sft_train.max_tokens_per_microbatch
    assert budget is not None, "the benchmark's experiment gives a token budget"
    model = model_shape(config.pretrain)
    shape = TrainShape(1, 1, budget, aggregation(config), 1.0, attention_cost=model.attention_cost if model else 0.0)
    while True:
        batch = given_batch([rows.example(number) for number in sampler.draw(plan_batch(config).sequences_per_step)])
        yield micro_batches_of(batch, range(len(batch)), ranks, shape)


def run_config(work: SftWork) -> SftConfig:
    """Return the run's own configuration."""
    config = checked_config(OmegaConf.create(OmegaConf.load(Path(work.scratch) / "run" / "config.yaml")))  # pyright: ignore[reportArgumentType]
    assert isinstance(config, SftConfig)
    return config


def model_of(work: SftWork, config: SftConfig, device: str) -> Any:
    """Build the model as in the run."""
    compiled = compiles(config.sft_train.model_args, on_gpu=device == "cuda")
    return plain.trainable(work, work.checkpointed, compiled, dynamic=True)


def updates(work: SftWork, config: SftConfig, rank: int, device: str) -> list[Update]:
    """Return the data of one rank in all steps of a floor, on the device."""
    steps = batches(config, work.train_ranks)
    found = []
    for _ in range(work.repetitions + 1):
        parts = next(steps)
        learnt = sum(int(part.batch.sequences.response_mask.sum()) for mine in parts for part in mine)
        found.append(Update([row_of(part.batch.sequences, device) for part in parts[rank]], learnt))
    return found


def row_of(sequences: Sequences, device: str) -> Row:
    """Return one packed row with its labels."""
    packed = packed_inputs(sequences, device)
    labels = torch.full_like(packed.token_ids, UNLEARNT)
    labels[packed.scored] = packed.token_ids[packed.scored]
    inputs = {
        "input_ids": packed.token_ids[None],
        "position_ids": packed.position_ids[None],
        "use_cache": False,
        "cu_seq_lens_q": packed.cu_seq_lens,
        "cu_seq_lens_k": packed.cu_seq_lens,
        "max_length_q": packed.max_length,
        "max_length_k": packed.max_length,
    }
    return Row(inputs, labels[None])


def deepspeed(work: SftWork, rank: int, device: str, timer: Timer) -> dict[str, list[float]]:
    """Return the seconds of each step after the first, and the loss of each step."""
    config = run_config(work)
    with plain.deepspeed_trainer(work, rank, device, partial(model_of, work, config, device)) as trainer:

        def loss(row: Row, learnt: int) -> Tensor:
            return trainer.model(**row.inputs, labels=row.labels, num_items_in_batch=learnt).loss

        seconds, losses = learn(trainer, updates(work, config, rank, device), loss, work.train_ranks, timer)
        if work.train_ranks > 1:
            torch.distributed.all_reduce(losses)
        return {"sft_deepspeed": seconds, "sft_deepspeed_loss": losses.tolist()}


def train(work: SftWork, rank: int, device: str, timer: Timer) -> dict[str, list[float]]:
    """Return the seconds of each step after the first, and the loss of each step."""
    config = run_config(work)
    with plain.bare_trainer(LogProbs(model_of(work, config, device)), device) as trainer:

        def loss(row: Row, learnt: int) -> Tensor:
            return -(trainer.model(row.inputs) * (row.labels[0, 1:] != UNLEARNT)).sum() / learnt

        seconds, losses = learn(trainer, updates(work, config, rank, device), loss, 1, timer)
        return {"sft_train": seconds, "sft_train_loss": losses.tolist()}


def learn(
    trainer: Trainer, given: list[Update], loss_of: Callable[[Row, int], Tensor], ranks: int, timer: Timer
) -> tuple[list[float], Tensor]:
    """Run every step once. Return the timer's seconds, and [steps] this rank's part of each step's loss."""
    steps, losses = iter(given), []

    def update() -> None:
        mine, total = next(steps), 0.0
        for row in mine.rows:
            loss = loss_of(row, mine.learnt)
            trainer.backward(loss * ranks)  # DeepSpeed averages gradients over ranks.
            total = total + loss.detach()
        trainer.step()
        losses.append(total)

    seconds = timer(update)
    return seconds, torch.stack(losses)
