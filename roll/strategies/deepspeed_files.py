"""DeepSpeed's checkpoint files: loaded by as many ranks as wrote them, and made into what any number can load.

A universal checkpoint holds each parameter's fp32 weights and optimizer states in one piece (Lian et al., Universal
Checkpointing, 2024); ranks cut out their own part when they load it.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from roll.errors import CheckpointError

TAG = "deepspeed"
"""Folder of a checkpoint with the states as the ranks hold them."""
UNIVERSAL = "deepspeed_universal"
"""Folder of a checkpoint with the states in whole tensors."""
WRAPPER = "model."
"""What the names of `PackedPolicy`'s parameters begin with."""


def random_file(folder: Path, rank: int) -> Path:
    """Where a rank keeps its random states."""
    return folder / f"random_rank{rank}.pt"


def load_states(engine: Any, folder: Path, world_size: int, strict: bool) -> bool:
    """Bring weights, optimizer and schedule to where the checkpoint was written; whether its ranks' random states apply, too.

    Raises:
        CheckpointError: there is nothing to load, or another number of ranks wrote it, or they shared the model out in another way.
    """
    if (folder / UNIVERSAL).is_dir():
        if engine.zero_optimization_stage() == 0:
            raise CheckpointError(f"{folder} is a universal checkpoint, which ZeRO-1, 2 and 3 can load and ZeRO-0 cannot")
        if engine.autotp_size() > 1:
            raise CheckpointError(f"{folder} is a universal checkpoint, which is not loaded with tensor_parallel: remove it")
        _load_universal(engine, folder)
        return False
    if not (folder / TAG).is_dir():
        raise CheckpointError(f"there is no state of the trainer in {folder}: it lacks the folder '{TAG}'")
    written = len(list(folder.glob(random_file(folder, 0).name.replace("0", "*"))))
    if written != world_size:
        raise CheckpointError(
            f"{folder} was written by {written} ranks, and there are {world_size}; `python -m roll.export {folder} OUT --format universal` "
            "makes one of it that any number of ranks can load: start with resume_from_checkpoint=OUT"
        )
    if (written := parts(folder)) != max(1, engine.autotp_size()):
        raise CheckpointError(f"{folder} was written with an autotp_size of {written}: resume with the same")
    engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=strict)
    return True


def parts(checkpoint: Path) -> int:
    """Ranks that the model was shared out over by tensor parallelism when a checkpoint was written."""
    return len({file.name.rpartition("mp_rank_")[2] for file in (checkpoint / TAG).glob("*mp_rank_*_model_states.pt")})


def _load_universal(engine: Any, folder: Path) -> None:
    # DeepSpeed asks for this in its configuration, where it would have to be known before there is an engine.
    engine._config.load_universal_checkpoint = True
    optimizer = engine.optimizer.optimizer
    own = [group["weight_decay"] for group in optimizer.param_groups]
    try:
        engine.load_checkpoint(str(folder), tag=UNIVERSAL)
    finally:
        engine._config.load_universal_checkpoint = False
    # Under ZeRO-3 it gives every group the settings of the first, and one tensor in which all of them count their steps.
    for group, weight_decay in zip(optimizer.param_groups, own, strict=True):
        group["weight_decay"] = weight_decay
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()


def to_universal(checkpoint: Path, out: Path) -> None:
    """Write the folder `UNIVERSAL` of `out` from the states in `checkpoint`.

    Raises:
        CheckpointError: the checkpoint is of ZeRO-0, which does not share states out, or of tensor parallelism.
    """
    _check_whole(checkpoint)
    if zero_stage(checkpoint) == 0:
        raise CheckpointError(f"{checkpoint} was written without ZeRO, so its states are not shared out over ranks; use stage 1, 2 or 3")
    # More than one worker would be forked beside torch's threads, and wait for ever.
    arguments = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(
        Namespace(input_folder=str(checkpoint / TAG), output_folder=str(out / UNIVERSAL), inject_missing_state=True, **arguments)
    )
    (out / "latest_universal").unlink(missing_ok=True)


def _check_whole(checkpoint: Path) -> None:
    if (count := parts(checkpoint)) > 1:
        raise CheckpointError(
            f"{checkpoint} was written with an autotp_size of {count}, and holds each tensor in parts: resume the run on the same ranks, "
            "which writes the whole model at its end"
        )


def zero_stage(checkpoint: Path) -> int:
    """The stage that wrote a checkpoint; 0 where no states are shared out."""
    for file in sorted((checkpoint / TAG).glob("*_optim_states.pt"))[:1]:
        states = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
        return int(states["optimizer_state_dict"].get("zero_stage", 0))
    return 0


def weights(checkpoint: Path, as_held: bool) -> dict[str, Tensor]:
    """What trained, under the model's own names.

    Args:
        as_held: in the precision in which the trainer computes with it (under ZeRO-3 an adapter is fp32 also beside bf16), to the
            bit; else in fp32 where ZeRO keeps such weights.

    Raises:
        CheckpointError: there is no state of a trainer in it, or one of tensor parallelism.
    """
    if not (checkpoint / TAG).is_dir():
        raise CheckpointError(f"there is no state of the trainer in {checkpoint}: it lacks the folder '{TAG}'")
    _check_whole(checkpoint)
    held: dict[str, Tensor] = torch.load(
        sorted((checkpoint / TAG).glob("*_model_states.pt"))[0], map_location="cpu", weights_only=False, mmap=True
    )["module"]
    if not zero_stage(checkpoint):
        return {name.removeprefix(WRAPPER): tensor for name, tensor in held.items()}
    found: Any = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=TAG, exclude_frozen_parameters=True)
    return {name.removeprefix(WRAPPER): tensor.to(held[name].dtype) if as_held else tensor for name, tensor in found.items()}
