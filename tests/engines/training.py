"""Code that the contract test of `TrainStrategy` runs on each rank: many trainers, one after another, in one process
group.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from roll.algorithms.objectives import PolicyLoss
from roll.backend import MicroBatch, Rank, TrainStepResult
from roll.backend_settings import ModelLoader
from roll.config.schema.model import ModelConfig, TrainingConfig
from roll.models.load import load_policy
from roll.models.packed import PackedPolicy
from roll.training.deepspeed.settings import DeepSpeedConfig, ShardedScoreSettings, TrainSettings
from roll.types import Floats, Sequences
from roll.weight_sync.bucket import plan_buckets, read_bucket
from roll.weight_sync.device import SLOTS
from roll.weight_sync.transfer import BucketSender

LOSS = PolicyLoss(kl_coef=0.1, entropy_coef=0.01)
TEMPERATURE = 0.8
VERSION = 3
"""Version of the policy before the first update."""
LEARNING_RATE = 1e-2
# Adam's first update is LEARNING_RATE x g / (|g| + epsilon). With the usual epsilon of 1e-8, the fraction is +-1 even
# for mere noise.
ADAM_EPSILON = 1e-3
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 0.5
SEED = 11
TOKEN_BUDGET = 14

ZERO: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    # By default, ZeRO-3 does not shard parameters as small as these.
    {"stage": 3, "stage3_param_persistence_threshold": 0},
]

VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "PiSSA": {"init_lora_weights": "pissa"},
    "LoRA+": {},
    "QLoRA": {"quantized_base": "nf4_double"},
}
"""LoRA variants, with the keys of `model_args` that choose them."""
PLUS = 4.0
"""`loraplus_lr_ratio` of the variant LoRA+."""

Updates = Sequence[Sequence[MicroBatch]]


@dataclass(frozen=True)
class Case:
    """A training configuration."""

    stage: int
    lora: bool
    dtype: str = "fp32"
    checkpointing: str | int = "all"
    compiled: bool = False
    short: bool = False
    """Simulate a shortage of memory, so that the token budget is halved."""
    dropout: float = 0.0
    whole: bool = False
    """Put all sequences of an update into one micro-batch. For one rank only."""
    sequence_parallel: int = 1
    """Number of ranks that split the tokens of a micro-batch."""
    tensor_parallel: int = 1
    """Number of ranks that split the linear layers of the model."""
    expert_parallel: int = 1
    """Number of ranks that divide the experts among them."""
    overlap: bool = False
    """Tensor-parallel ranks overlap their all-reduces with computation."""
    share_inputs: bool = False
    """Each tensor-parallel rank keeps only its part of a recomputed layer's input, and keeps it in host memory."""
    fp32_sums: bool = False
    """Accumulate the gradients of micro-batches in fp32."""
    variant: str = ""
    """A key of `VARIANTS`."""
    optimizer: str = "adamw"
    replays: bool = False
    """Replay the routes of the sequences."""

    @property
    def name(self) -> str:
        """Name of the case's folder and of its parameter in pytest's report."""
        parts = [f"ZeRO-{self.stage}", "LoRA" if self.lora else "full", self.dtype]
        parts += [f"checkpointing {self.checkpointing}"] * (self.checkpointing != "all") + ["compiled"] * self.compiled
        parts += ["dropout"] * (self.dropout > 0) + ["one micro-batch"] * self.whole + ["short"] * self.short
        parts += [f"over {self.sequence_parallel}"] * (self.sequence_parallel > 1)
        parts += [f"model over {self.tensor_parallel}"] * (self.tensor_parallel > 1) + ["overlapped"] * self.overlap
        parts += [f"experts over {self.expert_parallel}"] * (self.expert_parallel > 1)
        parts += ["inputs shared"] * self.share_inputs + ["sums in fp32"] * self.fp32_sums
        parts += [self.variant] * bool(self.variant) + [self.optimizer] * (self.optimizer != "adamw")
        parts += ["replaying"] * self.replays
        return ", ".join(parts).replace(" ", "_")


@dataclass(frozen=True)
class Work:
    """One rank's share of the work. All cases train on the same sequences; only the packing depends on the case."""

    first: Updates
    """One update."""
    second: Updates
    """Three more updates: the rest of two epochs of two updates each."""
    single: Updates
    """One update on a single sequence; other ranks get fillers."""
    broken: Updates
    """One update whose loss is NaN."""
    scored: Sequence[Sequences]
    """Micro-batches to score."""


@dataclass(frozen=True)
class Outcome:
    """The results of one rank. Weights are complete on rank 0 and empty on other ranks."""

    scored_before: list[Floats]
    first: dict[str, Tensor]
    first_result: TrainStepResult
    second: dict[str, Tensor]
    second_result: TrainStepResult
    scored_after: list[Floats]
    scored_without_adapter: list[Floats]
    adapter: dict[str, Tensor]
    resumed: dict[str, Tensor]
    resumed_result: TrainStepResult
    broken: dict[str, Tensor]
    broken_result: TrainStepResult
    single: dict[str, Tensor]
    single_result: TrainStepResult
    bytes_here: int
    """Result of `held_bytes` before `offload`."""
    bytes_away: int
    """Result of `held_bytes` after `offload`."""
    load_of_nothing: str
    """Error that `load` raises for a folder without a checkpoint."""


def model_args(case: Case) -> ModelConfig:
    """Return the policy's `model_args` for a case."""
    return ModelConfig.model_validate(
        {
            "dtype": case.dtype,
            "lora_target": "all-linear" if case.lora else None,
            "lora_rank": 4,
            "lora_alpha": 16.0,
            "lora_dropout": case.dropout,
            "gradient_checkpointing": case.checkpointing,
            "compile_layers": case.compiled,
        }
        | VARIANTS[case.variant]
    )


def settings(case: Case, model: Path, seed: int, load: ModelLoader = load_policy) -> TrainSettings:
    """Return the `TrainSettings` of a case."""
    training: dict[str, Any] = {
        "optimizer": case.optimizer,
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": ADAM_EPSILON,
        "weight_decay": WEIGHT_DECAY,
        "loraplus_lr_ratio": PLUS if case.variant == "LoRA+" else None,
    }
    return TrainSettings(
        str(model),
        model_args(case),
        TrainingConfig.model_validate(training),
        DeepSpeedConfig.model_validate(
            {
                "zero_optimization": ZERO[case.stage],
                "sequence_parallel_size": case.sequence_parallel,
                "tensor_parallel": {"autotp_size": case.tensor_parallel, "tp_overlap_comm": case.overlap},
                "expert_parallel": {"autoep_size": case.expert_parallel},
                "activation_checkpointing": dict.fromkeys(
                    ("partition_activations", "cpu_checkpointing"), case.share_inputs
                ),
                "data_types": {"grad_accum_dtype": "fp32"} if case.fp32_sums else None,
                "fp16": {"initial_scale_power": 8} if case.dtype == "fp16" else None,
            }
        ),
        max_grad_norm=MAX_GRAD_NORM,
        total_updates=10,
        token_budget=TOKEN_BUDGET,
        seed=seed,
        load=load,
        replays_routes=case.replays,
    )


class Short:
    """A memory probe that reports 10 bytes available, while every micro-batch uses 100."""

    def available(self) -> int:
        return 10

    def begin(self) -> None:
        pass

    def used(self) -> int:
        return 100


@contextmanager
def trainer(case: Case, model: Path, rank: Rank, seed: int, load: ModelLoader = load_policy) -> Iterator[Any]:
    """Yield the trainer of a case."""
    from roll.models.memory_guard import MemoryGuard, Need, over_hosts

    with trainer_of(settings(case, model, seed, load), rank) as strategy:
        if case.short:
            most = over_hosts(rank.world_size, rank.timeout)
            strategy._guard = MemoryGuard(TOKEN_BUDGET, Need(0, 1.0), Short(), most)
        yield strategy


@contextmanager
def trainer_of(chosen: Any, rank: Rank) -> Iterator[Any]:
    """Yield a trainer, then close and free it. The process group stays for the next trainer."""
    from roll.training.deepspeed.strategy import DeepSpeedTrain

    gc.freeze()  # so that the collection below visits the trainer's objects and not all of torch
    strategy = DeepSpeedTrain(chosen, rank)
    try:
        yield strategy
    finally:
        with mock.patch.object(torch.distributed, "destroy_process_group"):
            strategy.close()
        del strategy
        torch._dynamo.reset()  # torch limits recompilations per process, and this one has many trainers
        gc.collect()


def tensors_of(strategy: Any, adapter: bool, folder: Path) -> dict[str, Tensor]:
    """Return the tensors that a weight sync sends: with `adapter` the adapter's, otherwise all, in buckets of 0.5
    MiB.
    """
    out: dict[str, Tensor] = {}
    sender = BucketSender(strategy, strategy._rank.rank, torch.device("cpu"))
    if adapter:
        written = sender.write_adapter(folder)
        return (
            {} if written is None else {name: tensor.clone() for name, tensor in read_bucket(written.weights).items()}
        )
    for number, names in enumerate(plan_buckets(strategy.tensors(adapter), 1 << 19)):
        path = folder / f"bucket{number}.safetensors"
        if (bucket := sender.write_bucket(names, path)) is not None:
            out |= {name: tensor.clone() for name, tensor in read_bucket(bucket).items()}
            path.unlink()
        filled = sender.fill_bucket(names, number % SLOTS, openers=0)
        assert {spec.name for spec in filled.tensors} == set(names)
    sender.empty_buckets()
    return out


def held_bytes(strategy: Any) -> int:
    """Return the bytes of parameters, their ZeRO partitions and optimizer states in host memory, without views of the
    model's file.
    """
    from roll.models.offload import storages, tensors_in

    held = tensors_in(list(strategy._model.parameters()), strategy._optimizer.state)
    return sum(storage.nbytes() for storage in storages(held, "cpu"))


def train_case(rank: Rank, case: Case, model: Path, work: Work, folder: Path) -> Outcome:
    """Run everything that the tests check for one case."""
    folder.mkdir(parents=True, exist_ok=True)

    def step(strategy: Any, updates: Updates, version: int) -> TrainStepResult:
        return strategy.train_step(updates, LOSS, TEMPERATURE, version)

    seen: dict[str, Any] = {}
    with trainer(case, model, rank, SEED) as strategy:
        seen["scored_before"] = strategy.log_probs(work.scored, TEMPERATURE, True)
        seen["first_result"] = step(strategy, work.first, VERSION)
        seen["first"] = tensors_of(strategy, False, folder)
        strategy.save(folder / "checkpoint")
        seen["second_result"] = step(strategy, work.second, VERSION + 1)
        seen["second"] = tensors_of(strategy, False, folder)
        seen["scored_after"] = strategy.log_probs(work.scored, TEMPERATURE, True)
        seen["scored_without_adapter"] = strategy.log_probs(work.scored, TEMPERATURE, False)
        seen["adapter"] = tensors_of(strategy, True, folder) if case.lora else {}
        strategy.export(folder / "export")
    # Another seed: equal results then prove that the state was restored.
    with trainer(case, model, rank, SEED + 1) as strategy:
        seen["load_of_nothing"] = _refusal(strategy, folder / "nothing")
        strategy.load(folder / "checkpoint")
        seen["bytes_here"] = held_bytes(strategy)
        strategy.offload()
        seen["bytes_away"] = held_bytes(strategy)
        strategy.onload()
        seen["resumed_result"] = step(strategy, work.second, VERSION + 1)
        strategy.offload()
        strategy.offload()
        strategy.onload()
        strategy.onload()
        seen["resumed"] = tensors_of(strategy, False, folder)
        seen["broken_result"] = step(strategy, work.broken, VERSION + 4)
        seen["broken"] = tensors_of(strategy, False, folder)
        seen["single_result"] = step(strategy, work.single, VERSION + 4)
        seen["single"] = tensors_of(strategy, False, folder)
    if rank.rank == 0:
        shutil.rmtree(folder / "checkpoint")
    return Outcome(**seen)


def _refusal(strategy: Any, folder: Path) -> str:
    try:
        strategy.load(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train_cases(
    rank: Rank, cases: Sequence[Case], model: Path, works: dict[bool, Sequence[Work]], folder: Path
) -> list[Outcome]:
    """Run the cases one after another. `works[whole][rank]` is the share of a rank."""
    with fp16_on_any_cpu():
        outcomes = [train_case(rank, case, model, works[case.whole][rank.rank], folder / case.name) for case in cases]
    torch.distributed.destroy_process_group()
    return outcomes


def fp16_on_any_cpu() -> AbstractContextManager[Any]:
    """Let DeepSpeed train in fp16. It refuses if the CPU has no instructions for it, although torch can compute it."""
    from deepspeed.accelerator import get_accelerator

    return mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: True)


def score_sharded(
    rank: Rank, model: Path, parts: Sequence[Sequence[Sequences]], stage_config: dict[str, Any]
) -> list[Floats]:
    """Return the log-probs that `DeepSpeedScore` computes for this rank's micro-batches."""
    from roll.training.deepspeed.score import DeepSpeedScore

    config = DeepSpeedConfig.model_validate({"zero_optimization": stage_config})
    strategy = DeepSpeedScore(
        ShardedScoreSettings(str(model), ModelConfig.model_validate({"dtype": "fp32"}), config, PackedPolicy), rank
    )
    strategy.offload()
    partitions = [vars(parameter)["ds_tensor"] for parameter in strategy._policy.parameters()]
    assert not any(partition.untyped_storage().nbytes() for partition in partitions)
    strategy.onload()
    scored = strategy.log_probs(parts[rank.rank], TEMPERATURE)
    strategy.close()
    return scored
