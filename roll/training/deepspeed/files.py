"""DeepSpeed's checkpoint files: loads them on as many ranks as wrote them, and converts them for any number of ranks.

A universal checkpoint stores each parameter's fp32 weights and optimizer states as whole tensors (Lian et al.,
Universal Checkpointing, 2024). Each rank selects its own part when it loads the checkpoint.

Reads the files of a checkpoint without executing code from them, even if DeepSpeed reads them.

`torch.load` uses pickle, which can execute code from a file, unless it accepts only tensors and plain values. DeepSpeed
calls it with unrestricted unpickling in two dozen places. An environment variable of torch overrides all of them.
"""

from __future__ import annotations

import logging
import os
import pickle
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import AUTOEP_LAYERS_KEY, PARAM_SLICE_MAPPINGS
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import zero_to_fp32
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.serialization import safe_globals

from roll.errors import CheckpointError

LOG = logging.getLogger(__name__)
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
"""Function that reconstructs pickled numpy arrays."""


def member(kind: type[Enum], name: str) -> Enum:
    """Return the member of `ZeroStageEnum` with the given name. Python 3.11.0 to 3.11.3 pickle enumeration members as
    `getattr` calls.

    In checkpoint files, this function replaces `getattr`.

    Raises:
        pickle.UnpicklingError: `kind` is another type, or it has no such member.
    """
    if kind is not ZeroStageEnum or name not in kind.__members__:
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL getattr of {name}")
    return kind[name]


PLAIN: list[Any] = [
    *((member, f"{module}.getattr") for module in ("builtins", "__builtin__")),
    LossScaler,
    DynamicLossScaler,
    ZeroStageEnum,
    fragment_address,
    RECONSTRUCT,
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]
"""Types and functions that a checkpoint file may refer to, in addition to tensors and plain values: those that
DeepSpeed's files contain, and those of numpy's random state.
"""


@contextmanager
def nothing_runs(folder: Path) -> Iterator[None]:
    """Let every `torch.load` of this process accept only tensors, plain values and what `PLAIN` lists while the block
    lasts.

    Raises:
        CheckpointError: a file in `folder` contains other objects.
    """
    earlier = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with safe_globals(PLAIN):
            yield
    except pickle.UnpicklingError as error:
        file, why = _refused(folder) or (folder, str(error))
        raise CheckpointError(
            f"{file} contains an object that roll does not write, and that could execute code when loaded: {why}. "
            f"Nothing was executed; resume from a checkpoint whose origin you trust"
        ) from error
    finally:
        if earlier is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = earlier


def load(file: Path, mapped: bool = False) -> Any:
    """Load a checkpoint's file into host memory, or `mapped` on disk. Raises CheckpointError, see `nothing_runs`."""
    with nothing_runs(file):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _refused(folder: Path) -> tuple[Path, str] | None:
    """Return the first file that torch refuses to load, with the refused object or the reason; None without one."""
    for file in [folder] if folder.is_file() else sorted(folder.rglob("*.pt")):
        try:
            with safe_globals(PLAIN):
                torch.load(file, map_location="meta", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error)
            _, found, name = reason.partition("GLOBAL ")
            return file, name.split()[0] if found else reason.strip().splitlines()[-1]
    return None


TAG = "deepspeed"
"""Subfolder of a checkpoint that has the states of each rank."""
UNIVERSAL = "deepspeed_universal"
"""Subfolder of a universal checkpoint that has the states as whole tensors."""
SWAPPED = "offloaded_tensors"
"""Subfolder of `TAG` with copies of the states that were on NVMe, one file per tensor."""
WRAPPER = "model."
"""Prefix that `PackedPolicy` adds to the model's parameter names."""


def random_file(folder: Path, rank: int) -> Path:
    """Return the path of the file with a rank's random states."""
    return folder / f"random_rank{rank}.pt"


def load_states(engine: Any, folder: Path, world_size: int, strict: bool, divisors: int = 1) -> bool:
    """Restore weights, optimizer and schedule. Return whether the random states of the ranks can also be restored.

    Args:
        divisors: Number of ranks that divide the experts of each layer among them.

    Raises:
        CheckpointError: there is no state to load; the checkpoint was written with another number of ranks, another
            degree of tensor or expert parallelism, other groups of parameters, or optimizer states in another place
            (memory or NVMe); it is universal, and the run uses ZeRO-0, tensor parallelism or optimizer states on NVMe,
            or only one of the two expert parallelism; or a file would execute code when loaded.
    """
    swaps = engine.zero_nvme_offload_optimizer()
    if (folder / UNIVERSAL).is_dir():
        _check_universal(engine, folder, divisors)
        _load_universal(engine, folder)
        return False
    if not (folder / TAG).is_dir():
        raise CheckpointError(f"there is no trainer state in {folder}: the folder '{TAG}' is missing")
    if (folder / TAG / SWAPPED).is_dir() != swaps:
        place = "in memory" if swaps else "on NVMe"
        raise CheckpointError(
            f"{folder} was written with optimizer states {place}: resume with the same offload_optimizer"
        )
    written = len(list(folder.glob(random_file(folder, 0).name.replace("0", "*"))))
    if written != world_size:
        remedy = (
            "states on NVMe can only be loaded by the same number of ranks"
            if swaps
            else f"`python -m roll.export {folder} OUT --format universal` converts it for any number of ranks: "
            "then start with resume_from_checkpoint=OUT"
        )
        raise CheckpointError(f"{folder} was written by {written} ranks, but there are {world_size}; {remedy}")
    if (written := parts(folder)) != max(1, engine.autotp_size()):
        raise CheckpointError(
            f"{folder} was written with an autotp_size of {written}: resume with the same autotp_size"
        )
    if (written := experts_over(folder)) != divisors:
        convert = f"; `python -m roll.export {folder} OUT --format universal` converts it for any size above 1"
        raise CheckpointError(
            f"{folder} was written with an autoep_size of {written}: resume with the same autoep_size"
            f"{convert if min(written, divisors) > 1 else ''}"
        )
    if engine.zero_optimization_stage() in (1, 2):
        _check_groups(engine, folder)
    with nothing_runs(folder):
        engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=strict)
    if swaps:
        _load_swapped(engine, folder)
    return True


def _check_groups(engine: Any, folder: Path) -> None:
    """Raise CheckpointError if the checkpoint has other groups of parameters than the run."""
    file = Path(engine._get_zero_ckpt_name(str(folder), TAG))
    written = load(file, mapped=True)["optimizer_state_dict"][PARAM_SLICE_MAPPINGS]
    own = engine.optimizer._param_slice_mappings
    if [sorted(group) for group in written] != [sorted(group) for group in own]:
        raise CheckpointError(
            f"{folder} was written with other groups of parameters ({len(written)}; the run has {len(own)}); "
            f"`python -m roll.export {folder} OUT --format universal` converts it: then start with "
            "resume_from_checkpoint=OUT"
        )


def _load_swapped(engine: Any, folder: Path) -> None:
    """Load the states that DeepSpeed 0.19 does not load if optimizer states are on NVMe.

    DeepSpeed loads only the swapped weights. It does not load their moments, the step counts, the loss scale, or
    tensors that are too small to be swapped.
    """
    zero, rank = engine.optimizer, engine.global_rank
    (file,) = (folder / TAG).glob(f"*zero_pp_rank_{rank}_mp_rank_*_optim_states.pt")
    saved = load(file)["optimizer_state_dict"]
    zero.loss_scaler, zero.dynamic_loss_scale = saved["loss_scaler"], saved["dynamic_loss_scale"]
    inner = saved["optimizer_state_dict"]
    zero._set_fp32_optimizer_param_groups()
    numbers = {
        id(flat): number
        for number, flat in enumerate(flat for group in zero.optimizer.param_groups for flat in group["params"])
    }
    zero._clear_fp32_optimizer_param_groups()
    for group, settings in zip(zero.optimizer.param_groups, inner["param_groups"], strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    swapped = folder / TAG / SWAPPED / f"rank{ds_to_universal.dp_index_to_str(rank)}"
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        zero._prepare_sub_group(index, set())
        flat.data.copy_(_unsharded(saved["fp32_flat_groups"][index], swapped / f"{flat.ds_id}.tensor.swp", flat))
        for key, value in inner["state"].get(numbers[id(flat)], {}).items():
            state = _unsharded(value, swapped / f"{key}-{flat.ds_id}.tensor.swp", flat)
            own = zero.optimizer.state[flat].setdefault(key, state)
            if isinstance(own, Tensor):
                own.copy_(state)
            else:
                zero.optimizer.state[flat][key] = state
        zero._reassign_or_swap_out_partitioned_parameters(index)
        zero._release_sub_group(index, set())
    if zero.persistent_parameters:  # replicated on each rank
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
    zero.checkpoint_event_epilogue()


def _unsharded(value: Any, file: Path, like: Tensor) -> Any:
    """Return a state as a whole tensor. A swapped one is read from its file: raw values, padded at the end."""
    if not isinstance(value, Tensor) or value.numel():
        return value
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: the checkpoint is incomplete, or was written for another model")
    return torch.from_file(str(file), shared=False, size=like.numel(), dtype=like.dtype).clone()


def parts(checkpoint: Path) -> int:
    """Return the degree of tensor parallelism with which a checkpoint was written."""
    return len({file.name.rpartition("mp_rank_")[2] for file in (checkpoint / TAG).glob("*mp_rank_*_model_states.pt")})


def experts_over(checkpoint: Path) -> int:
    """Return the degree of expert parallelism with which a checkpoint was written. Raises CheckpointError, see
    `nothing_runs`.
    """
    for file in sorted((checkpoint / TAG).glob("*model_states.pt")):
        if not file.name.startswith("layer_"):  # the file of one expert
            layers = load(file, mapped=True).get(AUTOEP_LAYERS_KEY) or [{"ep_size": 1}]
            return int(layers[0]["ep_size"])
    return 1


def _check_universal(engine: Any, folder: Path, divisors: int) -> None:
    """Raise CheckpointError if the run cannot load this universal checkpoint, see `load_states`."""
    swaps = engine.zero_nvme_offload_optimizer()
    if swaps:
        raise CheckpointError(
            f"{folder} is a universal checkpoint, which cannot be loaded with optimizer states on NVMe: "
            "set offload_optimizer.device to cpu"
        )
    if engine.zero_optimization_stage() == 0:
        raise CheckpointError(
            f"{folder} is a universal checkpoint, which cannot be loaded with ZeRO-0: use ZeRO-1, 2 or 3"
        )
    if engine.autotp_size() > 1:
        raise CheckpointError(
            f"{folder} is a universal checkpoint, which cannot be loaded with tensor_parallel: remove it"
        )
    if (divided := _has_divided_experts(folder)) != (divisors > 1):
        raise CheckpointError(
            f"{folder} was written {'with' if divided else 'without'} expert_parallel: resume "
            f"{'with an autoep_size above 1' if divided else 'without it'}"
        )


def _has_divided_experts(universal: Path) -> bool:
    """Return whether a universal checkpoint was written with expert parallelism, and has AutoEP's names of experts."""
    return any((universal / UNIVERSAL / "zero").glob("*.experts.w1"))


def _load_universal(engine: Any, folder: Path) -> None:
    # DeepSpeed reads this from its configuration, which had to be complete before the engine was built.
    engine._config.load_universal_checkpoint = True
    optimizer = engine.optimizer.optimizer
    own = [group["weight_decay"] for group in optimizer.param_groups]
    is_alike = engine.zero_optimization_stage() == 3 or len(_groups_in(folder)) == len(own)
    try:
        with nullcontext(folder) if is_alike else _regrouped(folder, len(own)) as place, nothing_runs(folder):
            engine.load_checkpoint(str(place), tag=UNIVERSAL, load_lr_scheduler_states=is_alike)
    finally:
        engine._config.load_universal_checkpoint = False
    schedule = engine.lr_scheduler
    if not is_alike:
        _continue_schedule(schedule, folder)
    # Under ZeRO-3, DeepSpeed gives all groups the settings of the first one and makes all states share one step
    # counter. Undo both.
    # The schedules of DeepSpeed do not restore the rates that they computed last.
    rates = schedule.get_last_lr() if hasattr(schedule, "base_lrs") else schedule.get_lr()
    for group, weight_decay, rate in zip(optimizer.param_groups, own, rates, strict=True):
        group["weight_decay"], group["lr"] = weight_decay, rate
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()


GLOBAL_STATES = Path("zero", "optimizer_state.pt")
"""File of a universal checkpoint with the settings of the optimizer's groups."""


def _groups_in(folder: Path) -> Sequence[dict[str, Any]]:
    """Return the settings of the groups of parameters of a universal checkpoint."""
    return load(folder / UNIVERSAL / GLOBAL_STATES, mapped=True)["param_groups"]


@contextmanager
def _regrouped(folder: Path, count: int) -> Iterator[Path]:
    """Yield a folder with the same universal checkpoint, in `count` groups whose settings are those of the run.

    With ZeRO-1 and 2, DeepSpeed loads only as many of the run's groups as the checkpoint has.
    """
    with TemporaryDirectory() as scratch:
        whole, place = folder.absolute() / UNIVERSAL, Path(scratch) / UNIVERSAL
        states = place / GLOBAL_STATES
        states.parent.mkdir(parents=True)
        for part in (*whole.iterdir(), *(whole / states.parent.name).iterdir()):
            if part.name not in GLOBAL_STATES.parts:
                (place / part.relative_to(whole)).symlink_to(part)
        torch.save(load(whole / GLOBAL_STATES) | {"param_groups": [{}] * count}, states)
        yield Path(scratch)


def _continue_schedule(schedule: Any, folder: Path) -> None:
    """Continue a schedule where it was, with the rates of the run's own groups."""
    saved = load(folder / UNIVERSAL / "mp_rank_00_model_states.pt", mapped=True)["lr_scheduler"]
    if not hasattr(schedule, "base_lrs"):  # of DeepSpeed
        schedule.load_state_dict(saved)
        return
    schedule.last_epoch, schedule._step_count = saved["last_epoch"], saved["_step_count"]
    factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    schedule._last_lr = [rate * factor for rate, factor in zip(schedule.base_lrs, factors, strict=True)]


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's moments, which DeepSpeed looks up when it converts states."""


def to_universal(checkpoint: Path, out: Path) -> None:
    """Convert the states in `checkpoint` to a universal checkpoint in the subfolder `UNIVERSAL` of `out`.

    Raises:
        CheckpointError: the checkpoint was written with ZeRO-0 (which does not shard states), with tensor parallelism,
            with optimizer states on NVMe, or by an optimizer without Adam's two moments; or a file would execute code
            when loaded.
    """
    _check_whole_layers(checkpoint)
    if zero_stage(checkpoint) == 0 and not _is_sharded(checkpoint):
        raise CheckpointError(
            f"{checkpoint} was written with ZeRO-0, and only checkpoints of ZeRO-1, 2 and 3 can be converted: use one "
            f"of these stages"
        )
    # More than one worker would hang: workers are forked while torch's threads are running.
    arguments: dict[str, Any] = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
    }
    arguments |= {"input_folder": str(checkpoint / TAG), "output_folder": str(out / UNIVERSAL)}
    try:
        with nothing_runs(checkpoint):
            ds_to_universal.main(Namespace(inject_missing_state=True, **arguments))
    except KeyError as error:
        if error.args[0] not in MOMENTS:
            raise
        raise CheckpointError(
            f"{checkpoint} was written by an optimizer other than AdamW, and DeepSpeed converts only Adam's two "
            f"moments: resume the run on the same number of ranks"
        ) from error
    (out / "latest_universal").unlink(missing_ok=True)


def _check_complete(checkpoint: Path) -> None:
    """Raise CheckpointError if a checkpoint cannot be read as whole tensors."""
    _check_whole_layers(checkpoint)
    if (count := experts_over(checkpoint)) > 1:
        raise CheckpointError(
            f"{checkpoint} was written with an autoep_size of {count}, and holds the experts in parts: resume the run "
            f"on the same ranks; it exports the whole model when it ends"
        )


def _check_whole_layers(checkpoint: Path) -> None:
    if (count := parts(checkpoint)) > 1:
        raise CheckpointError(
            f"{checkpoint} was written with an autotp_size of {count}, and holds each tensor in parts: resume the run "
            f"on the same ranks; it exports the whole model when it ends"
        )
    if (checkpoint / TAG / SWAPPED).is_dir():
        raise CheckpointError(
            f"{checkpoint} was written with optimizer states on NVMe: resume the run; it exports the model when it ends"
        )


def zero_stage(checkpoint: Path) -> int:
    """Return the ZeRO stage with which a checkpoint was written; 0 if the states are not sharded."""
    for file in sorted((checkpoint / TAG).glob("*_optim_states.pt"))[:1]:
        states = load(file, mapped=True)
        return int(states["optimizer_state_dict"].get("zero_stage", 0))
    return 0


def _is_sharded(checkpoint: Path) -> bool:
    """Return whether the states are sharded. With bf16 and fp32 sums, DeepSpeed shards them but names no stage."""
    files = sorted((checkpoint / TAG).glob("*_optim_states.pt"))[:1]
    return any(PARAM_SLICE_MAPPINGS in load(file, mapped=True)["optimizer_state_dict"] for file in files)


@contextmanager
def _logged() -> Iterator[None]:
    """A context in which DeepSpeed's script logs what it prints, and shows no progress bars."""
    script: Any = zero_to_fp32
    bars = script.tqdm
    script.tqdm = partial(bars, disable=True)
    script.print = lambda *words: LOG.info("DeepSpeed: %s", " ".join(map(str, words)))
    try:
        yield
    finally:
        script.tqdm = bars
        del script.print


def trained_weights(checkpoint: Path, as_held: bool, with_frozen: bool = False) -> dict[str, Tensor]:
    """Return the trained weights of a checkpoint, under the model's own names.

    Args:
        with_frozen: Return also weights that were not trained, such as those of a vision tower. Checkpoints of an
            adapter have none.
        as_held: Return the weights bitwise as the trainer computes with them (with ZeRO-3, adapters are fp32 even if
            the model is bf16). Otherwise, return ZeRO's fp32 master weights where they exist.

    Raises:
        CheckpointError: there is no trainer state; the checkpoint was written with tensor parallelism or optimizer
            states on NVMe; or a file would execute code when loaded.
    """
    if not (checkpoint / TAG).is_dir():
        raise CheckpointError(f"there is no trainer state in {checkpoint}: the folder '{TAG}' is missing")
    _check_complete(checkpoint)
    held: dict[str, Tensor] = load(sorted((checkpoint / TAG).glob("*_model_states.pt"))[0], mapped=True)["module"]
    if not zero_stage(checkpoint):
        return {name.removeprefix(WRAPPER): tensor for name, tensor in held.items()}
    with nothing_runs(checkpoint), _logged():
        found: Any = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint), tag=TAG, exclude_frozen_parameters=not with_frozen
        )
    return {
        name.removeprefix(WRAPPER): tensor.to(held[name].dtype) if as_held else tensor for name, tensor in found.items()
    }
