"""Train a policy with DeepSpeed: ZeRO-0 to 3, all parameters or a LoRA adapter, bf16, fp16 or fp32."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import Tensor
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from roll.algorithms.losses import Loss
from roll.config.schema_engine import DeepSpeedConfig
from roll.config.schema_model import ModelArgs, TrainingArgs
from roll.errors import CheckpointError
from roll.models.export import adapter_config, write_adapter_folder, write_model
from roll.models.load import PackedPolicy, add_lora, load_causal_model, load_tokenizer
from roll.models.packed_inputs import packed_inputs, scored_only, spread, to_device
from roll.models.weights import WeightView
from roll.strategies.base import MicroBatch, Rank, TrainResult
from roll.strategies.deepspeed_setup import deepspeed_config, join, optimizer_and_schedule
from roll.strategies.loss_inputs import loss_inputs
from roll.strategies.offload import Offload, tensors_in
from roll.strategies.tally import Tally
from roll.types import Floats, Metrics, Sequences, TensorSpec
from roll.weight_sync.bucket import Adapter, Bucket, plan_buckets, write_adapter, write_bucket
from roll.weight_sync.device import DeviceBucket, DeviceSender
from roll.weight_sync.routes import Meeting

TAG = "deepspeed"
EXPORT_BYTES = 2 << 30


@dataclass(frozen=True)
class TrainSettings:
    """Everything the strategy reads of the configuration."""

    model_path: str
    model_args: ModelArgs
    training: TrainingArgs
    deepspeed: DeepSpeedConfig
    max_grad_norm: float
    total_updates: int
    """Optimizer updates of the whole run; the schedule ends there."""
    seed: int


class DeepSpeedTrain:
    """Implements `TrainStrategy`."""

    def __init__(self, settings: TrainSettings, rank: Rank) -> None:
        self._settings, self._rank = settings, rank
        join(rank)
        config = deepspeed_config(settings.deepspeed, settings.model_args.dtype, settings.max_grad_norm)
        # Must outlive the engine: while it lives, from_pretrained shards the model as it loads (ZeRO-3).
        self._shards_at_load = HfDeepSpeedConfig(config) if settings.deepspeed.zero_optimization.stage == 3 else None
        model = load_causal_model(settings.model_path, settings.model_args)
        self._is_lora = settings.model_args.lora_target is not None
        policy = PackedPolicy(add_lora(model, settings.model_args, settings.seed) if self._is_lora else model)
        if not settings.model_args.disable_gradient_checkpointing:
            _checkpoint_activations(policy, self._is_lora)
        optimizer, schedule = optimizer_and_schedule(policy, settings.training, settings.deepspeed, settings.total_updates, rank.device)
        self._engine: Any = deepspeed.initialize(model=policy, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
        self._policy, self._optimizer = policy, optimizer
        self._offload = Offload(rank.device)
        self._weights = WeightView(policy.model)
        self._sender = DeviceSender(torch.device(rank.device))
        _seed_everything(settings.seed + rank.rank)

    def train_step(self, updates: Sequence[Sequence[MicroBatch]], loss: Loss, temperature: float, policy_version: int) -> TrainResult:
        """See `TrainStrategy`."""
        self._engine.train()
        tally = Tally()
        scalars: Metrics = {"policy/skipped_updates": 0.0}
        for number, micro_batches in enumerate(updates):
            skipped = self._engine.skipped_steps
            for micro_batch in micro_batches:
                value = self._loss(micro_batch, loss, temperature, tally, policy_version if number == 0 else None)
                # DeepSpeed averages gradients over ranks; the weights of a loss sum to one over all of them.
                self._engine.backward(value * self._rank.world_size)
            self._engine.step()
            scalars["policy/skipped_updates"] += self._engine.skipped_steps - skipped
        if (norm := self._engine.get_global_grad_norm()) is not None:  # plain fp32 without ZeRO does not keep it
            scalars["policy/grad_norm"] = float(norm)
        scalars["policy/lr"] = float(self._engine.get_lr()[0])
        return tally.result(scalars)

    def _loss(self, micro_batch: MicroBatch, loss: Loss, temperature: float, tally: Tally, version: int | None) -> Tensor:
        batch, device = micro_batch.batch, self._rank.device
        sequences = batch.sequences
        log_probs, entropy = self._engine(packed_inputs(sequences, device), temperature)
        inputs = loss_inputs(batch, device)
        token_losses = loss(log_probs, entropy, inputs)
        tally.add(token_losses.metrics, len(log_probs))
        if version is not None and inputs.behaviour_log_probs is not None:
            current = batch.policy_versions[sequences.response_mask] == version
            tally.add_mismatch(log_probs.detach() - inputs.behaviour_log_probs, to_device(current, device), int(current.sum()))
        return (token_losses.losses * scored_only(micro_batch.loss_weights, sequences, device)).sum()

    @torch.no_grad()
    def log_probs(self, micro_batches: Sequence[Sequences], temperature: float, adapter: bool) -> list[Floats]:
        """See `TrainStrategy`."""
        self._engine.eval()
        with nullcontext() if adapter or not self._is_lora else self._policy.model.disable_adapter():  # pyright: ignore[reportCallIssue]
            # Read only when all is queued: the device need not wait for the host between two micro-batches.
            scores = [self._engine(packed_inputs(part, self._rank.device), temperature)[0] for part in micro_batches]
        return [spread(values, part) for values, part in zip(scores, micro_batches, strict=True)]

    def tensors(self, adapter: bool) -> list[TensorSpec]:
        """See `TrainStrategy`."""
        return self._weights.adapter_specs() if adapter else self._weights.model_specs()

    def write_bucket(self, names: Sequence[str], path: Path) -> Bucket | None:
        """See `TrainStrategy`."""
        with self._whole(names, adapter=False) as tensors:
            return write_bucket(path, tensors) if self._rank.rank == 0 else None

    def write_adapter(self, folder: Path | None) -> Adapter | None:
        """See `TrainStrategy`."""
        with self._whole([tensor.name for tensor in self.tensors(adapter=True)], adapter=True) as tensors:
            return write_adapter(folder, adapter_config(self._policy.model), tensors) if self._rank.rank == 0 else None

    def join_broadcast(self, meeting: Meeting) -> None:
        """See `TrainStrategy`."""
        self._sender.join(meeting)

    def fill_bucket(self, names: Sequence[str], slot: int) -> DeviceBucket:
        """See `TrainStrategy`."""
        with self._whole(names, adapter=False) as tensors:
            return self._sender.fill(tensors, slot)

    def empty_buckets(self) -> None:
        """See `TrainStrategy`."""
        self._sender.empty()

    @contextmanager
    def _whole(self, names: Sequence[str], adapter: bool) -> Iterator[dict[str, Tensor]]:
        """Whole tensors by name on every rank, for as long as the block lasts; one all-gather for the lot."""
        view = self._weights
        parameters = view.adapter_parameters(names) if adapter else view.model_parameters(names)
        with deepspeed.zero.GatheredParameters(parameters), torch.no_grad():
            yield view.adapter_tensors(names) if adapter else view.model_tensors(names)

    def save(self, folder: Path) -> None:
        """See `TrainStrategy`."""
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=self._is_lora)
        states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        if self._rank.device == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        torch.save(states, folder / f"random_rank{self._rank.rank}.pt")

    def load(self, folder: Path) -> None:
        """See `TrainStrategy`."""
        if not (folder / TAG).is_dir():
            raise CheckpointError(f"there is no state of the trainer in {folder}: it lacks the folder '{TAG}'")
        self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not self._is_lora)
        states = torch.load(folder / f"random_rank{self._rank.rank}.pt", weights_only=False)
        torch.set_rng_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["python"])
        if self._rank.device == "cuda":
            torch.cuda.set_rng_state(states["cuda"])

    def export(self, folder: Path) -> None:
        """See `TrainStrategy`. Written bucket by bucket: no process ever holds the whole model."""
        buckets = (self._kept(names) for names in plan_buckets(self.tensors(self._is_lora), EXPORT_BYTES))
        if self._rank.rank != 0:
            for _ in buckets:
                pass
            return
        tokenizer = load_tokenizer(self._settings.model_path, self._settings.model_args.trust_remote_code)
        if self._is_lora:
            write_adapter_folder(folder, _merge(buckets), self._policy.model, tokenizer)
        else:
            write_model(folder, buckets, self._policy.causal, tokenizer)

    def _kept(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies on the host of what is exported, on rank 0; nothing elsewhere."""
        with self._whole(names, self._is_lora) as tensors:
            return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()} if self._rank.rank == 0 else {}

    def leave(self) -> None:
        """See `TrainStrategy`. Weights, gradients, optimizer states and ZeRO's buffers; what remains is the CUDA context and NCCL's."""
        held = [[*self._policy.parameters(), *self._policy.buffers()], self._optimizer.state, self._optimizer.param_groups]
        self._offload.leave(tensors_in(*held, vars(self._engine.optimizer)))

    def come(self) -> None:
        """See `TrainStrategy`."""
        self._offload.come()

    def close(self) -> None:
        """See `TrainStrategy`."""
        self._sender.close()
        self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _merge(buckets: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def _checkpoint_activations(policy: PackedPolicy, is_lora: bool) -> None:
    """Recompute decoder layers in the backward pass.

    ZeRO-3 leaves empty parameters behind after a forward pass, and torch's check that the recomputation saved the
    same shapes takes that for a fault (the error that LoRA with ZeRO-3 is known for). The re-entrant form makes no
    such check; it needs an input with a gradient, which a frozen embedding does not give of itself.
    """
    causal = policy.causal
    causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if is_lora:
        causal.enable_input_require_grads()


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
