"""Trains a policy, a reward model or a critic with DeepSpeed: ZeRO-0 to 3, all parameters or a LoRA adapter, in bf16,
fp16 or fp32.

Builds the inputs of a loss from a micro-batch: the fields of its response tokens, on the device.

Implements `gradient_checkpointing: auto`: chooses the number of recomputed decoder layers from measurements in the
first updates.

Weights the auxiliary loss of routers by tokens, over micro-batches and ranks, and reports it.

Makes DeepSpeed 0.19 without ZeRO, in bf16 and fp16, behave like its ZeRO optimizers in two respects.

Sums of metrics over the micro-batches of a step, kept on the device and read once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from roll.algorithms.losses import Counted, Loss, LossInputs
from roll.backend import MicroBatch, Rank, TrainStepResult
from roll.config.derived.model_shape import shape_of
from roll.config.plan.memory import (
    ATTENTION_ONLY,
    activations,
    checkpointed_layers,
    compiles,
    fewest_checkpointed,
    head_bytes,
    layer_activations,
)
from roll.config.schema.model import TrainingConfig
from roll.errors import ConfigError, Fault
from roll.models.export import adapter_config, copy_processor, write_adapter_folder, write_model
from roll.models.layers import (
    checkpoint_first,
    compile_layers,
    decoder_layers,
    disable_noise,
    keep_inputs,
    on_host,
    prepare_checkpointing,
    recompute_attention,
)
from roll.models.load import load_tokenizer
from roll.models.memory_guard import (
    FEWER_TOKENS,
    RECOMPUTE,
    SHARD,
    CudaMemory,
    MemoryGuard,
    Need,
    of_one_rank,
    over_hosts,
    readable_memory_errors,
)
from roll.models.offload import Offload, tensors_in
from roll.models.packed import PackedModel, PackedPolicy, packed_inputs, score, scored_only
from roll.models.pictures import to_device
from roll.models.replay import RouteReplay
from roll.models.routers import RouterLoss, balanced_routers
from roll.models.weights import WeightView
from roll.system.signs import announce
from roll.training.deepspeed.averaged import AveragedWeights
from roll.training.deepspeed.experts import WholeExperts, clip_whole_norm, expert_group, share_experts
from roll.training.deepspeed.files import TAG, load, load_states, random_file
from roll.training.deepspeed.finite import FiniteWatch
from roll.training.deepspeed.muon import divide_matrices
from roll.training.deepspeed.settings import TrainSettings
from roll.training.deepspeed.setup import (
    compiling_in_turn,
    engine_config,
    gather_whole_experts,
    gather_whole_layers,
    join_process_group,
    optimizer_and_schedule,
    own_swap,
    scale_of,
    sequence_group,
)
from roll.training.deepspeed.tensor import adapters_opened, set_tensor_plan, shared_inputs, whole_weights
from roll.types import Bools, Floats, Metrics, Sequences, TensorSpec, TrainBatch
from roll.weight_sync.bucket import plan_buckets

WITHIN = ("mismatch/logprob_abs_diff_mean", "mismatch/kl")
"""Names of the mismatch metrics for responses sampled by one version of the policy."""
SPANNING = ("mismatch/spanning/logprob_abs_diff_mean", "mismatch/spanning/kl")
"""Names of the mismatch metrics for responses sampled by several versions of the policy."""


class MetricSums:
    """Adds up metrics without waiting for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counted: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._tokens = 0

    def add(self, metrics: Mapping[str, Tensor], tokens: int) -> None:
        """Add token metrics [S] of a micro-batch with S = `tokens` response tokens."""
        for name, values in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + values.sum(dtype=torch.float64)
        self._tokens += tokens

    def count(self, metrics: Mapping[str, Counted]) -> None:
        """Add metrics that exist only for some of a micro-batch's tokens, sequences or pairs."""
        for name, (values, counts_in) in metrics.items():
            self._counted[name] = self._counted.get(name, 0.0) + torch.where(counts_in, values, 0.0).sum(
                dtype=torch.float64
            )
            self._counts[name] = self._counts.get(name, 0.0) + counts_in.sum(dtype=torch.float64)

    def weigh(self, metrics: Mapping[str, Tensor], tokens: int) -> None:
        """Add scalar metrics of a micro-batch, weighted by its number of tokens, prompts included."""
        for name, value in metrics.items():
            self._counted[name] = self._counted.get(name, 0.0) + value.double() * tokens
            self._counts[name] = self._counts.get(name, 0.0) + torch.full_like(value, tokens, dtype=torch.float64)

    def add_mismatch(self, difference: Tensor, current: Tensor, spanning: Tensor) -> None:
        """Add metrics of the log-prob mismatch between trainer and engine: absolute differences, and KL(engine ||
        trainer) by k3.

        Args:
            difference: [S], log-probs of the trainer minus those of the engine.
            current: bool [S], tokens sampled by the current version. Other tokens are left out.
            spanning: bool [S], tokens of responses sampled by several versions. For these, the engine may have reused a
                KV cache that an older version computed.
        """
        compared = torch.where(current, difference.double(), 0.0)
        values = (compared.abs(), torch.expm1(compared) - compared)
        for names, chosen in ((WITHIN, current & ~spanning), (SPANNING, current & spanning)):
            self.count({name: (value, chosen) for name, value in zip(names, values, strict=True)})

    def result(self, scalars: Metrics) -> TrainStepResult:
        """Return all sums together with `scalars`. The sums are copied to the host in a single copy."""
        tables = (self._sums, self._counted, self._counts)
        there = [value for table in tables for value in table.values()]
        values = iter(torch.stack(there).tolist() if there else [])
        sums, counted, counts = ({name: next(values) for name in table} for table in tables)
        return TrainStepResult(sums, self._tokens, scalars, counted, counts)


def undo_first_step(engine: Any) -> None:
    """Undo the step that DeepSpeed takes while building the engine, to create the optimizer states.

    That step has zero gradients but counts as an update: Adam's bias correction would be one step ahead, and weight
    decay has changed the master weights. This function clears the states, so that the first real step creates them, and
    copies the model's weights to the master weights.
    """
    if _is_wrapped(engine):
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


def missing_scale(engine: Any) -> float:
    """Return the factor by which to multiply losses before `engine.backward`, and to divide the reported gradient norm.

    In fp16 without ZeRO this is the loss scale: `step` divides gradients by it, but `backward` multiplies losses by it
    only with ZeRO's optimizers. With these optimizers, and in other precisions, the factor is 1.
    """
    return float(engine.optimizer.loss_scale) if _is_wrapped(engine) else 1.0


def _is_wrapped(engine: Any) -> bool:
    """Return whether the optimizer is `FP16_UnfusedOptimizer`, which holds master weights, for bf16 too."""
    return hasattr(engine.optimizer, "loss_scale_config")


class RouterBalance:
    """Adds the loss of the routers to the loss of an update.

    The added term is `coefficient` times the mean of the routers' loss over all micro-batches and ranks, weighted by
    tokens. As in transformers, the loss of a micro-batch covers all of its tokens, prompts included. Packed
    micro-batches have no padding.
    """

    def __init__(self, loss: RouterLoss, coefficient: float, rank: Rank) -> None:
        self._loss, self._coefficient, self._rank = loss, coefficient, rank
        self._total = torch.ones((), device=rank.device)
        self._tokens = 0
        self._measured: list[tuple[dict[str, Tensor], int]] = []

    def begin_update(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Count the tokens of an update over all ranks. Collective, but does not wait for the device."""
        total = torch.tensor(float(sum(map(tokens_of_samples, micro_batches))), device=self._rank.device)
        if self._rank.world_size > 1:
            torch.distributed.all_reduce(total)
        self._total = total.clamp(min=1.0)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Prepare for the forward pass of a micro-batch."""
        self._tokens = tokens_of_samples(micro_batch)
        # Multiply by the world size, because DeepSpeed averages gradients over ranks.
        weight = self._coefficient * self._tokens * self._rank.world_size / self._total
        self._loss.begin(weight if self._coefficient else None)

    def end(self) -> None:
        """Record the metrics of a micro-batch, after its backward pass."""
        self._measured.append((self._loss.end(), self._tokens))

    def report(self, sums: MetricSums) -> None:
        """Add the metrics recorded since the last report to `sums`."""
        for metrics, tokens in self._measured:
            sums.weigh(metrics, tokens)
        self._measured.clear()


def tokens_of_samples(micro_batch: MicroBatch) -> int:
    """Return the number of tokens of a micro-batch, prompts included; 0 for a filler."""
    return len(micro_batch.batch.sequences.token_ids) if micro_batch.samples else 0


def router_balance(training: TrainingConfig, causal: PreTrainedModel, rank: Rank) -> RouterBalance | None:
    """Build the balance of routers; None without `router_aux_loss_coef`. Raises ConfigError without routers."""
    coefficient = training.router_aux_loss_coef
    if coefficient is None:
        return None
    if routers := balanced_routers(causal):
        return RouterBalance(RouterLoss(routers), coefficient, rank)
    where = f"{rank.role}.training_args.router_aux_loss_coef"
    problem = (
        f"{coefficient:g}, but the model ({causal.config.model_type}) has no routers that choose experts by a softmax"
    )
    raise ConfigError(Fault(where, problem, "remove it", "no_effect"))


RESERVE = 0.05
"""Fraction of the device's memory that stays free, for fragmentation and for libraries that allocate outside torch."""
CHOICES = 2
"""Number of choices: the first uses an estimate of the memory of a layer, the second uses a measurement."""


class AutoCheckpointing:
    """Recomputes all layers in the first update, which allocates permanent memory, then as few as memory allows."""

    def __init__(
        self, guard: MemoryGuard, layers: int, layer_bytes: float, total: int, apply: Callable[[int], None]
    ) -> None:
        """Start with all `layers` recomputed.

        Args:
            guard: The trainer's memory guard.
            layers: Number of decoder layers.
            layer_bytes: Estimate of the extra bytes per token for each layer that is not recomputed.
            total: Memory of the device, in bytes.
            apply: Function that sets the number of recomputed layers.
        """
        self._guard, self._layers, self._layer_bytes, self._total, self._apply = (
            guard,
            layers,
            layer_bytes,
            total,
            apply,
        )
        self._updates = 0
        self._all = guard.need
        self.checkpointed = layers

    def before_update(self) -> None:
        """Choose the number of recomputed layers before the second and third update. Do nothing before others."""
        self._updates += 1
        if self._updates == 1 or self._updates > 1 + CHOICES:
            return
        if self.checkpointed == self._layers:
            self._all = self._guard.need
        else:
            kept = self._layers - self.checkpointed
            self._layer_bytes = max(1.0, (self._guard.need.per_token - self._all.per_token) / kept)
        tokens = self._guard.token_budget
        spare = self._guard.memory.available() - int(RESERVE * self._total) - self._all.of(tokens)
        count = self._guard.most(fewest_checkpointed(spare, self._layers, int(self._layer_bytes * tokens)))
        if count != self.checkpointed:
            self.checkpointed = count
            self._apply(count)
            more = self._layer_bytes * (self._layers - count)
            self._guard.expect(Need(self._all.fixed, self._all.per_token + more))
            LOG.info("gradient_checkpointing: %d of %d layers", count, self._layers)


def loss_inputs(batch: TrainBatch, device: str) -> LossInputs:
    """Return the fields of the batch at its S response tokens, in the order of the model's outputs."""

    def scored(field: Floats) -> Tensor:
        return scored_only(field, batch.sequences, device)

    def if_given(field: Floats | None) -> Tensor | None:
        return None if field is None else scored(field)

    mask = batch.sequences.response_mask
    lengths = np.add.reduceat(mask, batch.sequences.offsets[:-1], dtype=np.int64)
    return LossInputs(
        advantages=scored(batch.advantages),
        lengths=to_device(lengths, device),
        behaviour_log_probs=if_given(batch.behaviour_log_probs),
        proximal_log_probs=if_given(batch.proximal_log_probs),
        ref_log_probs=if_given(batch.ref_log_probs),
        token_selection=None if batch.token_selection is None else to_device(batch.token_selection[mask], device),
        labels=None if batch.labels is None else to_device(batch.labels, device),
        values=if_given(batch.values),
        returns=if_given(batch.returns),
    )


def spans_update(batch: TrainBatch) -> Bools:
    """Return a mask [S] of the response tokens whose sequence was sampled by more than one version of the policy."""
    mask, starts = batch.sequences.response_mask, batch.sequences.offsets[:-1]
    lowest = np.minimum.reduceat(np.where(mask, batch.policy_versions, np.iinfo(np.int32).max), starts)
    highest = np.maximum.reduceat(np.where(mask, batch.policy_versions, np.iinfo(np.int32).min), starts)
    return np.repeat(lowest < highest, batch.sequences.lengths)[mask]


EXPORT_BYTES = 2 << 30
"""Largest size of a file of exported weights, in bytes, unless a single tensor is larger."""
LOG = logging.getLogger(__name__)


class DeepSpeedTrain:
    """Implements `TrainStrategy`."""

    def __init__(self, settings: TrainSettings, rank: Rank) -> None:
        self._settings, self._rank, self._held = settings, rank, ExitStack()
        self._held.enter_context(compiling_in_turn(rank))
        announce("joining the process group")
        join_process_group(rank)
        with readable_memory_errors(rank, "building the trainer", SHARD):
            self._build(settings, rank)
        self._guard, self._checkpointing = self._watch_memory() if rank.device == "cuda" else (None, None)
        _seed_everything(settings.seed + rank.rank)

    def _build(self, settings: TrainSettings, rank: Rank) -> None:
        model_args, compiled = settings.model_args, compiles(settings.model_args, rank.device == "cuda")
        deepspeed_keys = self._held.enter_context(own_swap(settings.deepspeed, rank))
        config = engine_config(deepspeed_keys, model_args.dtype, settings.max_grad_norm, compiled)
        # Must outlive the engine. While this object exists, from_pretrained shards models during loading (ZeRO-3). With
        # `tensor_parallel`, it would raise NotImplementedError; the engine splits the sharded model for AutoTP.
        by_zero = {key: value for key, value in config.items() if key != "tensor_parallel"}
        self._shards_at_load = HfDeepSpeedConfig(by_zero) if settings.deepspeed.zero_optimization.stage == 3 else None
        announce("loading the model")
        model = settings.load(settings.model_path, model_args, settings.seed)
        announce("model loaded; building the optimizer")
        for buffer in model.buffers():  # DeepSpeed does not move the buffers of a model that was sharded during loading
            buffer.data = buffer.data.to(rank.device)
        self._is_lora = model_args.lora_target is not None
        self._divisors = settings.deepspeed.expert_parallel_size
        if self._divisors > 1:
            share_experts(model.causal, self._divisors, model_args.dropout, rank)
        self._over = sequence_group(settings.deepspeed, model.causal, rank)
        if settings.replays_routes:
            model.replay = RouteReplay(model.causal)
        self._balance = router_balance(settings.training, model.causal, rank)
        self._arrange_layers(model)
        optimizer, schedule = optimizer_and_schedule(
            model, settings.training, settings.deepspeed, settings.total_updates, rank
        )
        self._finite = FiniteWatch(model, rank, settings.training.max_consecutive_skips)
        self._sharers = settings.deepspeed.tensor_parallel_size
        if self._sharers > 1:
            set_tensor_plan(model, self._sharers, rank)
        announce("building the engine")
        with adapters_opened():
            self._engine: Any = deepspeed.initialize(
                model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
            )[0]
        undo_first_step(self._engine)
        divide_matrices(self._engine)
        if self._divisors > 1:
            clip_whole_norm(self._engine, settings.max_grad_norm, expert_group(self._divisors))
        self._model, self._optimizer = model, optimizer
        self._offload = Offload(rank.device)
        self._averaged = AveragedWeights(model, rate) if (rate := settings.average_rate) is not None else None
        if self._sharers > 1:
            self._weights: WeightView = whole_weights(self._engine, model.model, rank)
        elif self._divisors > 1:
            self._weights = WholeExperts(model.model, self._divisors)
        else:
            self._weights = WeightView(model.model)

    def _arrange_layers(self, model: PackedModel) -> None:
        """Set up activation checkpointing and compilation, before DeepSpeed adds its hooks."""
        model_args, causal = self._settings.model_args, model.causal
        compiled = compiles(model_args, self._rank.device == "cuda")
        if model_args.gradient_checkpointing == ATTENTION_ONLY:
            recompute_attention(causal, self._is_lora, compiled)
        self._checkpointed = checkpointed_layers(model_args.gradient_checkpointing, len(decoder_layers(causal)))
        if self._checkpointed:
            prepare_checkpointing(causal, self._is_lora)
            checkpoint_first(causal, self._checkpointed)
            keeping = self._settings.deepspeed.activation_checkpointing or {}
            if keeping.get("partition_activations"):
                keep_inputs(causal, partial(shared_inputs, bool(keeping.get("cpu_checkpointing"))))
            elif keeping.get("cpu_checkpointing"):
                keep_inputs(causal, on_host)
        if self._shards_at_load and self._divisors == 1:
            gather_whole_experts(causal)
        if compiled:
            compile_layers(causal)
        # DoRA reads the weights of an adapted layer without calling their modules.
        if self._shards_at_load and (compiled or model_args.use_dora):
            gather_whole_layers(causal)

    def _watch_memory(self) -> tuple[MemoryGuard, AutoCheckpointing | None]:
        model_args, causal, rank = self._settings.model_args, self._model.causal, self._rank
        whole, layers = shape_of(causal.config.to_dict()), len(decoder_layers(causal))
        most = over_hosts(rank.world_size, rank.timeout) if rank.world_size > 1 else of_one_rank
        if whole is None:  # an unknown architecture: its memory use is unknown until it is measured
            return MemoryGuard(self._settings.token_budget, Need(0, 0.0), CudaMemory(), most), None
        width, compiled = 4 if model_args.dtype == "fp32" else 2, compiles(model_args, on_gpu=True)
        shape = whole.part(self._sharers)
        budget, sharing = self._settings.token_budget, self._over.size if self._over else 1
        logits = (
            head_bytes(shape, -(-budget // sharing), width, not self._is_lora)
            if isinstance(self._model, PackedPolicy)
            else 0
        )
        need = Need(logits, activations(shape, 1, width, model_args.gradient_checkpointing, compiled) / sharing)
        guard = MemoryGuard(budget, need, CudaMemory(), most)
        if model_args.gradient_checkpointing != "auto":
            return guard, None
        # An upper bound: compiled code needs less memory, but some layers may run uncompiled. The true value is
        # measured later.
        kept = (layer_activations(shape, 1, width, compiled=False) - width * shape.hidden_size) / sharing
        total = torch.cuda.mem_get_info()[1]
        return guard, AutoCheckpointing(guard, layers, kept, total, partial(checkpoint_first, causal))

    def train_step(
        self, updates: Sequence[Sequence[MicroBatch]], loss: Loss, temperature: float, policy_version: int
    ) -> TrainStepResult:
        self._engine.train()
        if not self._settings.model_args.dropout:
            disable_noise(self._model.causal)
        sums, role, metric_prefix = MetricSums(), self._rank.role, loss.metric_prefix
        scalars: Metrics = {f"{metric_prefix}/skipped_updates": 0.0}
        norm_scale = 1.0
        with readable_memory_errors(self._rank, "training", FEWER_TOKENS, RECOMPUTE):
            for number, micro_batches in enumerate(updates):
                skipped, norm_scale = self._engine.skipped_steps, missing_scale(self._engine)
                if self._checkpointing:
                    self._checkpointing.before_update()
                if self._balance:
                    self._balance.begin_update(micro_batches)
                version = policy_version if number == 0 else None
                self._accumulate(
                    micro_batches, lambda part, version=version: self._loss(part, loss, temperature, sums, version)
                )
                # Read before `step`, which sets the next update's rate.
                scalars[f"{metric_prefix}/lr"] = float(self._engine.get_lr()[0])
                self._engine.step()
                skipped = self._engine.skipped_steps - skipped
                scalars[f"{metric_prefix}/skipped_updates"] += skipped
                self._finite.settle(skipped > 0)
            self._finite.check()
        if self._averaged:
            self._averaged.update()
        if self._settings.takes_turns and self._rank.device == "cuda":
            # The weight sync moves the engine's weights to the same GPU. They need the memory that torch has cached for
            # activations.
            torch.cuda.empty_cache()
        self._forget_routes()
        if self._balance:
            self._balance.report(sums)
        if (
            norm := self._engine.get_global_grad_norm()
        ) is not None:  # DeepSpeed does not compute it in fp32 without ZeRO
            scalars[f"{metric_prefix}/grad_norm"] = float(norm) / norm_scale
        if (loss_scale := scale_of(self._engine)) is not None:
            scalars[f"{metric_prefix}/loss_scale"] = loss_scale
        scalars[f"memory/{role}/token_budget"] = (
            self._guard.token_budget if self._guard else self._settings.token_budget
        )
        scalars[f"memory/{role}/checkpointed_layers"] = (
            self._checkpointing.checkpointed if self._checkpointing else self._checkpointed
        )
        return sums.result(scalars)

    def _forget_routes(self) -> None:
        """Free the routes of the last micro-batch."""
        if self._model.replay:
            self._model.replay.begin(None)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]) -> None:
        """Accumulate the gradients of an update."""
        # DeepSpeed averages gradients over all ranks except tensor-parallel ones, but they must be summed: loss weights
        # sum to one over all replicas, and sequence-parallel ranks each have the gradients of their own tokens.
        scale = self._rank.world_size // self._sharers
        if self._guard is None:
            for micro_batch in micro_batches:
                self._backward(micro_batch, loss_of(micro_batch) * scale)
            return
        # A failed forward pass can be retried only if no other ranks and no ZeRO-3 hooks take part in it.
        retries = self._rank.world_size == 1 and self._shards_at_load is None
        queue = self._guard.within_budget(micro_batches)
        while queue:
            queue = self._guard.admit(queue)
            with self._guard.measured(queue[0]):
                value = (
                    _or_none(loss_of, queue[0]) if retries and queue[0].batch.example_count > 1 else loss_of(queue[0])
                )
                if value is not None:
                    self._backward(queue[0], value * scale)
            if value is None:
                torch.cuda.empty_cache()
                queue = self._guard.halve(queue)
            else:
                queue = queue[1:]
        self._guard.update_ended()

    def _backward(self, micro_batch: MicroBatch, loss: Tensor) -> None:
        self._engine.backward(self._finite.loss(loss) * missing_scale(self._engine))
        self._finite.ran(micro_batch)
        if self._balance:
            self._balance.end()

    def _loss(
        self, micro_batch: MicroBatch, loss: Loss, temperature: float, sums: MetricSums, version: int | None
    ) -> Tensor:
        batch, device = micro_batch.batch, self._rank.device
        sequences = batch.sequences
        if self._balance:
            self._balance.begin(micro_batch)
        outputs = self._engine(packed_inputs(sequences, device, temperature, batch.teacher_states, self._over))
        inputs = loss_inputs(batch, device)
        token_losses = loss(*outputs, inputs)
        sums.add(token_losses.metrics, len(token_losses.losses))
        sums.count(token_losses.counted)
        if version is not None and inputs.behaviour_log_probs is not None:
            difference = outputs[0].detach() - inputs.behaviour_log_probs
            current = batch.policy_versions[sequences.response_mask] == version
            sums.add_mismatch(difference, to_device(current, device), to_device(spans_update(batch), device))
        return (token_losses.losses * scored_only(micro_batch.loss_weights, sequences, device)).sum()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float) -> TrainStepResult:
        self._engine.eval()
        sums = MetricSums()
        with readable_memory_errors(self._rank, "evaluating", FEWER_TOKENS):
            for micro_batch in micro_batches:
                self._loss(micro_batch, loss, temperature, sums, None)
        return sums.result({})

    @torch.no_grad()
    def log_probs(self, micro_batches: Sequence[Sequences], temperature: float, adapter: bool) -> list[Floats]:
        self._engine.eval()
        adapter_state = nullcontext() if adapter or not self._is_lora else self._model.model.disable_adapter()  # pyright: ignore[reportCallIssue]
        try:
            with adapter_state:
                return score(self._engine, micro_batches, temperature, self._rank, self._over)
        finally:
            self._forget_routes()

    def averaged_log_probs(self, micro_batches: Sequence[Sequences], temperature: float) -> list[Floats]:
        assert self._averaged is not None, "the settings ask for no average"
        with self._averaged.in_place():
            return self.log_probs(micro_batches, temperature, adapter=True)

    @torch.no_grad()
    def values(self, micro_batches: Sequence[Sequences]) -> list[Floats]:
        self._engine.eval()
        return score(self._engine, micro_batches, 1.0, self._rank, self._over)

    def tensors(self, adapter: bool) -> list[TensorSpec]:
        return self._weights.adapter_specs() if adapter else self._weights.model_specs()

    @contextmanager
    def gathered(self, names: Sequence[str], adapter: bool) -> Iterator[dict[str, Tensor]]:
        """See `TrainStrategy`. Gathers all tensors in one all-gather."""
        view = self._weights
        parameters = view.adapter_parameters(names) if adapter else view.model_parameters(names)
        with deepspeed.zero.GatheredParameters(parameters), torch.no_grad():
            yield view.adapter_tensors(names) if adapter else view.model_tensors(names)

    def adapter_config(self) -> str:
        return adapter_config(self._model.model)

    def save(self, folder: Path) -> None:
        # `save_latest` writes the file `latest` with the tag, which DeepSpeed's script zero_to_fp32.py in the same
        # folder reads.
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=True, exclude_frozen_parameters=self._is_lora)
        states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        if self._rank.device == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        torch.save(states, random_file(folder, self._rank.rank))
        if self._averaged:
            self._averaged.save(folder, self._rank.rank)

    def load(self, folder: Path) -> None:
        ranks, strict = self._rank.world_size, not self._is_lora
        is_alike = load_states(self._engine, folder, ranks, strict, self._divisors)
        if self._averaged:
            self._averaged.load(folder, self._rank.rank)
        if not is_alike:
            return
        states = load(random_file(folder, self._rank.rank))
        torch.set_rng_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["python"])
        if self._rank.device == "cuda":
            torch.cuda.set_rng_state(states["cuda"])

    def export(self, folder: Path) -> None:
        """See `TrainStrategy`. Writes the model bucket by bucket, so that no process keeps all of it in memory."""
        # A reward model trains its head in addition to the adapter, so the adapter alone would be incomplete.
        adapter = self._is_lora and isinstance(self._model, PackedPolicy)
        buckets = (self._kept(names, adapter) for names in plan_buckets(self.tensors(adapter), EXPORT_BYTES))
        if self._rank.rank != 0:
            for _ in buckets:
                pass
            return
        tokenizer = load_tokenizer(self._settings.model_path, self._settings.model_args.trust_remote_code)
        if adapter:
            write_adapter_folder(folder, _merge(buckets), self._model.model, tokenizer, self._settings.ends)
        else:
            write_model(folder, buckets, self._model.causal, tokenizer, self._settings.ends)
        if self._model.tower:
            copy_processor(self._settings.model_path, folder)

    def _kept(self, names: Sequence[str], adapter: bool) -> dict[str, Tensor]:
        """Gather tensors and return copies in host memory on rank 0. Other ranks return an empty dict."""
        with self.gathered(names, adapter) as tensors:
            return (
                {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()} if self._rank.rank == 0 else {}
            )

    def offload(self) -> None:
        """See `TrainStrategy`. Frees weights, gradients, optimizer states and ZeRO's buffers, but not NCCL's."""
        held = [
            [*self._model.parameters(), *self._model.buffers()],
            self._optimizer.state,
            self._optimizer.param_groups,
        ]
        if self._settings.model_args.quantized_base:
            from roll.models.quantized import scales

            held.append(scales(self._model))
        self._offload.offload(tensors_in(*held, vars(self._engine.optimizer)))

    def onload(self) -> None:
        with readable_memory_errors(self._rank, "returning to the device"):
            self._offload.onload()

    def close(self) -> None:
        self._engine.destroy()
        self._held.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _merge(buckets: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def _or_none(loss_of: Callable[[MicroBatch], Tensor], micro_batch: MicroBatch) -> Tensor | None:
    """Return the loss, or None if the device ran out of memory: the error and its frames' tensors are freed."""
    try:
        return loss_of(micro_batch)
    except torch.OutOfMemoryError as error:
        LOG.warning("out of memory in the forward pass: %s", str(error).partition("\n")[0])
        return None


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
