"""Builds what a DeepSpeed strategy needs from the role's keys: the configuration, the process groups, the optimizer and
schedule over groups of trained parameters, and private swap folders on NVMe, because DeepSpeed names swap files only by
rank and parameter. Only one process of roll compiles DeepSpeed's ops at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils import cpp_extension
from torch.utils.cpp_extension import load
from transformers import PreTrainedModel, get_scheduler

from roll.backend import Rank
from roll.config.schema.foreign_names import DEEPSPEED_SCHEDULES
from roll.config.schema.model import TrainingConfig
from roll.errors import ConfigError, Fault
from roll.models.layers import decoder_layers
from roll.models.pictures import sees
from roll.models.routers import expert_blocks
from roll.models.sequence_parallel import SequenceGroup, not_shared_out
from roll.system.own_folder import own_folder, remove_ownerless
from roll.system.signs import announce
from roll.training.deepspeed.experts import expert_group, total_norm
from roll.training.deepspeed.extension_locks import turn_to_compile
from roll.training.deepspeed.muon import Muon, is_hidden
from roll.training.deepspeed.settings import DeepSpeedConfig
from roll.weight_sync.meeting import meet, own_place
from roll.weight_sync.store import open_store


@contextmanager
def own_swap(config: DeepSpeedConfig, rank: Rank) -> Iterator[DeepSpeedConfig]:
    """Yield the configuration with each `nvme_path` replaced by a new private folder below it. The folders are removed
    at the end.

    At the start, folders left behind by killed processes are removed.

    Raises:
        ConfigError: an `nvme_path` is not a writable folder, or libaio is not installed.
    """
    zero, paths = config.zero_optimization, config.swap_paths
    with ExitStack() as folders:
        if paths:
            _check(paths, rank)
        own = {}
        for key, path in paths.items():
            remove_ownerless(path)
            own[key] = getattr(zero, key).model_copy(update={"nvme_path": str(folders.enter_context(own_folder(path)))})
        yield config.model_copy(update={"zero_optimization": zero.model_copy(update=own)})


def _check(paths: dict[str, Path], rank: Rank) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportAttributeAccessIssue]

    zero = f"{rank.role}.strategy_args.strategy_config.zero_optimization"
    faults = [
        Fault(
            f"{zero}.{key}.nvme_path",
            f"{path} is not a writable folder on this host",
            "create it on every host of the role",
            "not_writable",
        )
        for key, path in paths.items()
        if not os.access(path, os.W_OK | os.X_OK) or not path.is_dir()
    ]
    if faults:
        raise ConfigError(*faults)
    if not AsyncIOBuilder().is_compatible():
        problem = "offloading to NVMe needs libaio with its headers, which is not installed"
        raise ConfigError(
            Fault(
                zero,
                problem,
                "install libaio-dev (Debian) or libaio-devel (Red Hat), or offload to cpu",
                "not_installed",
            )
        )


SHARE_OF_START = 0.8
"""Share of the start deadline to wait for another compilation: less, so that the error names this wait."""


@contextmanager
def compiling_in_turn(rank: Rank) -> Iterator[None]:
    """Make DeepSpeed compile every op under `turn_to_compile` while the block lasts. A compilation may then raise
    TimeoutError.

    DeepSpeed compiles ops at first use, for example in `init_distributed` or a backward pass, so they cannot be
    compiled in advance. It always compiles through `torch.utils.cpp_extension.load`, which this function replaces.
    """
    seconds = SHARE_OF_START * rank.start_timeout

    def load_in_turn(name: str, *arguments: Any, **settings: Any) -> Any:
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        with turn_to_compile(folder, seconds, f"{rank.role} rank {rank.rank}"):
            if (folder / f"{name}.so").exists():
                return load(name, *arguments, **settings)
            announce(f"compiling {name}")
            loaded = load(name, *arguments, **settings)
            announce(f"{name} compiled")
            return loaded

    cpp_extension.load = load_in_turn
    try:
        yield
    finally:
        cpp_extension.load = load


def is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has more than one dimension, before sharding by ZeRO-3."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2


def adapter_rate(name: str, parameter: nn.Parameter, training: TrainingConfig) -> float:
    """Return the learning rate of an adapter's parameter. As in PEFT's LoRA+, vectors have that of the matrices B."""
    own = training.lora_learning_rate
    rate = training.learning_rate if own is None else own
    is_fast = "lora_B" in name or not is_matrix(parameter)
    return rate * (training.loraplus_lr_ratio or 1.0) if is_fast else rate


LARGEST_GROUP = 2**28
"""Most parameters of a group with ZeRO-1 and ZeRO-2, which copy the gradients of a group before its update, once in
their own precision and once in fp32. A larger parameter is a group by itself.
"""


def parameter_groups(model: nn.Module, training: TrainingConfig, largest: int | None = None) -> list[dict[str, Any]]:
    """Group the trained parameters by learning rate and weight decay, at most `largest` of them in a group.

    Norms, biases and other vectors have no weight decay. LoRA matrices may have their own learning rates. There are no
    empty groups, because DeepSpeed cannot partition them. Experts that ranks divide among them have groups of their
    own, with DeepSpeed's mark, because their states are sharded over other ranks.
    """
    groups: dict[tuple[float, float, str | None], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = training.learning_rate if "lora_" not in name else adapter_rate(name, parameter, training)
            decay = training.weight_decay if is_matrix(parameter) else 0.0
            groups.setdefault((rate, decay, getattr(parameter, "group_name", None)), []).append(parameter)
    return [
        {"params": part, "lr": rate, "weight_decay": decay} | ({"moe": True, "name": ranks} if ranks else {})
        for (rate, decay, ranks), chosen in groups.items()
        for part in ([chosen] if largest is None else runs_of(chosen, largest))
    ]


def runs_of(parameters: Sequence[nn.Parameter], largest: int) -> list[list[nn.Parameter]]:
    """Split parameters, in order, into runs of at most `largest` numbers; a larger parameter is a run by itself."""
    runs: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if parameter.numel() > room:
            runs.append([])
            room = largest
        runs[-1].append(parameter)
        room -= parameter.numel()
    return runs


class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay (https://arxiv.org/abs/2302.06675)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Perform one update."""
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                update = state["exp_avg"].lerp(parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate)
                state["exp_avg"].lerp_(parameter.grad, 1 - second)


class Adagrad(Optimizer):
    """Adagrad (https://jmlr.org/papers/v12/duchi11a.html), with weight decay added to the gradient.

    It creates its states at the first step. torch's Adagrad creates them in the constructor; DeepSpeed 0.19 would then
    build the optimizer again for ZeRO's partitions, and thereby lose its parameter groups and its connection to the
    schedule.
    """

    def __init__(self, params: Any, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Perform one update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.add(parameter, alpha=group["weight_decay"])
                state = self.state[parameter]
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(parameter)
                state["sum"].addcmul_(gradient, gradient)
                parameter.addcdiv_(gradient, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])


def finite_only(kind: type[Optimizer], experts_over: ProcessGroup | None = None) -> type[Optimizer]:
    """Return a subclass of an optimizer that skips updates with a non-finite gradient.

    The ranks of `experts_over`, which divide experts among them, skip an update together.

    DeepSpeed checks gradients if it wraps the optimizer, but in fp32 without ZeRO it does not wrap the optimizer. Even
    then it reads the optimizer's attribute `overflow`. If that is true, it counts the update as skipped and does not
    advance the schedule.
    """

    class Checked(kind):
        overflow = False

        def step(self, closure: Any = None) -> Any:
            trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            if experts_over is None:
                norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
            else:
                norm = total_norm(trained, experts_over)
            self.overflow = not bool(torch.isfinite(norm))
            return None if self.overflow else super().step(closure)

    Checked.__name__ = f"Checked{kind.__name__}"
    return Checked


@dataclass(frozen=True)
class Place:
    """The rank, the ZeRO stage and the device of an optimizer."""

    rank: Rank
    stage: int
    """ZeRO stage."""
    offloaded: bool
    """Whether states and master weights are in host memory while the model is on a GPU."""
    experts_over: ProcessGroup | None = None
    """The ranks that divide experts among them, if any do."""

    def groups(self, model: nn.Module, training: TrainingConfig) -> list[dict[str, Any]]:
        """Return `parameter_groups`, of limited size where ZeRO copies the gradients of a group."""
        return parameter_groups(model, training, LARGEST_GROUP if self.stage in (1, 2) else None)

    def kind(self, optimizer: type[Optimizer]) -> type[Optimizer]:
        """Return the optimizer's class. With ZeRO stage 0, it skips updates with a non-finite gradient."""
        return finite_only(optimizer, self.experts_over) if self.stage == 0 else optimizer


def make_optimizer(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    """Build the optimizer of `training_args.optimizer`. Raises ConfigError without its GPU or its package."""
    return OPTIMIZERS[training.optimizer](model, training, place)


def _adamw(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    groups = place.groups(model, training)
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    if place.offloaded:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    return place.kind(torch.optim.AdamW)(groups, fused=True, **settings)  # pyright: ignore[reportCallIssue]


def _adamw_8bit(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    where = f"{place.rank.role}.training_args.optimizer"
    if place.rank.device != "cuda" or place.offloaded:
        problem = "'adamw_8bit' keeps its states on a GPU, but here they would be in host memory"
        raise ConfigError(Fault(where, problem, "use adamw, or a GPU without offload_optimizer", "not_supported"))
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError as error:
        problem = f"'adamw_8bit' needs the package bitsandbytes, which cannot be imported: {error}"
        raise ConfigError(Fault(where, problem, "pip install bitsandbytes, or use adamw", "not_installed")) from error
    betas = (training.adam_beta1, training.adam_beta2)
    kind = place.kind(AdamW8bit)
    return kind(place.groups(model, training), lr=training.learning_rate, betas=betas, eps=training.adam_epsilon)  # pyright: ignore[reportCallIssue]


def _lion(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    groups, betas = place.groups(model, training), (training.adam_beta1, training.adam_beta2)
    if place.offloaded:
        from deepspeed.ops.lion import DeepSpeedCPULion

        return DeepSpeedCPULion(groups, lr=training.learning_rate, betas=betas)
    return place.kind(Lion)(groups, lr=training.learning_rate, betas=betas)  # pyright: ignore[reportCallIssue]


def _adagrad(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    groups = place.groups(model, training)
    settings: dict[str, Any] = {"lr": training.learning_rate, "eps": training.adam_epsilon}
    if place.offloaded:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        return DeepSpeedCPUAdagrad(groups, **settings)
    return place.kind(Adagrad)(groups, **settings)


def _muon(model: nn.Module, training: TrainingConfig, place: Place) -> Optimizer:
    """Build Muon for the matrices of decoder layers, and AdamW for the embedding, the head and all vectors."""
    matrices = {
        id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters() if is_hidden(parameter)
    }
    groups = []
    for group in place.groups(model, training):
        for hidden in (True, False):
            if chosen := [parameter for parameter in group["params"] if (id(parameter) in matrices) == hidden]:
                groups.append(group | {"params": chosen, "hidden": hidden})
    betas = (training.adam_beta1, training.adam_beta2)
    settings: dict[str, Any] = {"lr": training.learning_rate, "betas": betas, "eps": training.adam_epsilon}
    return place.kind(Muon)(groups, **settings, device=place.rank.device)  # pyright: ignore[reportCallIssue]


OPTIMIZERS: dict[str, Callable[[nn.Module, TrainingConfig, Place], Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "lion": _lion,
    "adagrad": _adagrad,
    "muon": _muon,
}


def make_schedule(optimizer: Optimizer, training: TrainingConfig, total_updates: int) -> Any:
    """Build the schedule selected by `training_args.lr_scheduler_type`, over `total_updates` optimizer updates."""
    warmup = training.warmup_steps or math.ceil(training.warmup_ratio * total_updates)
    if training.lr_scheduler_type in DEEPSPEED_SCHEDULES:
        return _deepspeed_schedule(optimizer, training, warmup, total_updates)
    return get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=max(total_updates, 1),
        scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
    )


def _deepspeed_schedule(optimizer: Optimizer, training: TrainingConfig, warmup: int, total_updates: int) -> Any:
    """Build a schedule of DeepSpeed. Its peak is the rate of each group of parameters."""
    given: dict[str, Any] = dict(training.lr_scheduler_kwargs)
    if training.lr_scheduler_type == "OneCycle":
        return lr_schedules.OneCycle(optimizer, cycle_max_lr=training.learning_rate, **given)
    given["warmup_num_steps"] = max(warmup, 1)
    if training.lr_scheduler_type != "WarmupCosineLR":
        given["warmup_max_lr"] = None  # the rate of each group
    if training.lr_scheduler_type != "WarmupLR":
        given.setdefault("total_num_steps", max(total_updates, 1))
    return getattr(lr_schedules, training.lr_scheduler_type)(optimizer, **given)


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def join_process_group(rank: Rank) -> None:
    """Join the role's process group, at first. Its collectives have a timeout of `rank.timeout` seconds.

    Raises:
        HostUnreachable: ranks on different hosts do not reach each other.
        TimeoutError: some ranks did not come.
    """
    if rank.device == "cuda":
        torch.cuda.set_device(0)
    timeout = timedelta(seconds=rank.timeout)
    if not torch.distributed.is_initialized():
        store = open_store(rank.meeting_point, rank.rank == 0, rank.timeout)
        if rank.master_address:  # several hosts
            meet(store, rank.rank, rank.world_size, rank.timeout, own_place(rank.device == "cuda"))
        torch.distributed.init_process_group(
            BACKENDS[rank.device], timeout=timeout, store=store, rank=rank.rank, world_size=rank.world_size
        )
    deepspeed.init_distributed(
        dist_backend=BACKENDS[rank.device], auto_mpi_discovery=False, verbose=False, timeout=timeout
    )


def sequence_group(config: DeepSpeedConfig, causal: PreTrainedModel, rank: Rank) -> SequenceGroup | None:
    """Return the group of ranks that split the tokens of a micro-batch, or None without sequence parallelism.

    They are neighbours or, with tensor parallelism, those ranks of a replica that have the same parts of the layers:
    AutoTP splits layers over neighbours.

    Raises:
        ConfigError: the model does not support this degree of sequence parallelism.
    """
    size, sharers = config.sequence_parallel_size, config.tensor_parallel_size
    if size == 1:
        return None
    pictures = "the model sees pictures, which are not split over ranks yet" if sees(causal) else None
    if why := pictures or not_shared_out(causal.config, size, sharers):
        where = f"{rank.role}.strategy_args.strategy_config.sequence_parallel_size"
        raise ConfigError(
            Fault(where, f"{size}, but {why}", "remove it, or set it to a size that the model allows", "not_supported")
        )
    replica = size * sharers
    members = [
        list(range(first + part, first + replica, sharers))
        for first in range(0, rank.world_size, replica)
        for part in range(sharers)
    ]
    group, _ = torch.distributed.new_subgroups_by_enumeration(members, timeout=timedelta(seconds=rank.timeout))
    assert isinstance(group, torch.distributed.ProcessGroup), "the ranks must be a whole number of replicas"
    return SequenceGroup(group.group_name, rank.rank // sharers % size, size)


def gather_whole_layers(causal: PreTrainedModel) -> None:
    """Make ZeRO-3 gather all parameters of a decoder layer before the layer runs: compiled code cannot run hooks inside
    it, and no hook runs for weights that are read without calling their module.

    DeepSpeed then reduces a layer's gradients as soon as the gradient of the layer's input is ready. If the input has
    no gradient, for example after a frozen embedding, torch would trigger the reduction before the layer's own
    gradients exist. So inputs are made to require gradients.
    """
    if kinds := {type(layer) for layer in decoder_layers(causal)}:
        causal.enable_input_require_grads()
        set_z3_leaf_modules(causal, list(kinds))


def gather_whole_experts(causal: PreTrainedModel) -> None:
    """Make ZeRO-3 gather a router and all its experts before their block runs.

    The experts that a rank uses depend on its tokens, so hooks on single experts would gather on some ranks only, and
    these ranks would hang. PEFT reads the adapter weights of fused experts without calling their modules, so hooks on
    these would never run. DeepSpeed does the same automatically, but only for three model families.
    """
    if kinds := expert_blocks(causal):
        set_z3_leaf_modules(causal, list(kinds))


def engine_config(config: DeepSpeedConfig, dtype: str, max_grad_norm: float | None, compiled: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    The number of micro-batches varies, so the caller of the engine decides when an update is complete
    (`managed_gradient_accumulation: false`), and the loss is already normalised. `compiled` specifies whether the
    decoder layers are compiled.
    """
    out = _without_auto(config.model_dump(exclude_none=True))
    if compiled and config.zero_optimization.stage == 3:
        # DeepSpeed's own linear function reads the id of each weight, so dynamo would recompile for every layer and
        # finally give up.
        out["zero_optimization"].setdefault("memory_efficient_linear", False)
    out |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": config.steps_per_print or 10**9,
    }
    # DeepSpeed must not see this key. Without it, DeepSpeed averages gradients over all ranks, and the trainer scales
    # losses for that.
    del out["sequence_parallel_size"]
    out.pop("expert_parallel", None)  # the layers are already replaced
    if config.tensor_parallel_size == 1:
        out.pop("tensor_parallel", None)
    out.pop("train_batch_size", None)
    out.pop("gradient_clipping", None)
    if max_grad_norm is not None:
        out["gradient_clipping"] = max_grad_norm
    for name in ("bf16", "fp16"):
        out[name] = (out.get(name) or {}) | {"enabled": dtype == name}
    out["bf16"]["check_grad_overflow"] = True
    return out


def _without_auto(block: dict[str, Any]) -> dict[str, Any]:
    """Return the block without keys set to `auto`, which only transformers' Trainer knows. DeepSpeed has defaults."""
    kept = {key: value for key, value in block.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


def scale_of(engine: Any) -> float | None:
    """Return the loss scale of fp16, or None in other precisions."""
    if not engine.fp16_enabled():
        return None
    unfused = getattr(engine.optimizer, "loss_scale_config", None)
    return float(engine.optimizer.loss_scale if unfused is None else unfused.cur_scale)


def optimizer_and_schedule(
    model: nn.Module, training: TrainingConfig, config: DeepSpeedConfig, total_updates: int, rank: Rank
) -> tuple[torch.optim.Optimizer, Any]:
    """Build the optimizer and schedule of `training_args`, for the ZeRO stage and the optimizer states' device."""
    zero = config.zero_optimization
    # On the CPU everything is in host memory anyway, and torch's optimizers need no compiler.
    offloaded = rank.device == "cuda" and zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
    size = config.expert_parallel_size
    over = expert_group(size) if size > 1 else None
    optimizer = make_optimizer(model, training, Place(rank, zero.stage, offloaded, over))
    return optimizer, make_schedule(optimizer, training, total_updates)
