"""Reads the headers of a model's weight files, to find broken files and unknown layers. Imports neither torch nor
transformers, for a dry run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from roll.errors import ConfigError, DataError, Fault
from roll.models.vision_names import is_of_vision

ALL_LINEAR = ["all-linear"]
"""The names in a `lora_target` that adapts all linear layers."""
UNADAPTED = ("embed_tokens", "embed_positions", "wte", "wpe", "lm_head", "score")
"""Names of embeddings and heads, as models of transformers have them."""


def check_readable(path: str, lora_target: str | None = None) -> None:
    """Read the headers of a local model's weight files, to find broken files and layers that an adapter lacks before
    anything starts. Do nothing for a Hub name.

    Raises:
        DataError: a file is missing or cannot be read.
        ConfigError: a name in `lora_target` matches no matrix of the safetensors files.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if not files and not list(folder.glob("*.bin")):
            problem = f"the model '{path}' cannot be read: it holds no weights (*.safetensors)"
            remedy = (
                f"give a folder with weights, or create random ones: python -m roll.models.initialise {path} OUT, "
                f"and set pretrain=OUT"
            )
            raise DataError(Fault("pretrain", problem, remedy, "unreadable"))
        matrices = [name for file in files for name in _matrices(file)]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError(unreadable(path, "model", error)) from error
    if matrices and lora_target is not None:
        check_targets(lora_target, [name for name in matrices if may_be_adapted(name)])


def _matrices(file: Path) -> list[str]:
    """Return the names of the layers with a matrix in a safetensors file."""
    with safe_open(file, "np") as opened:
        stored = opened.keys()
        names = [name for name in stored if name.endswith(".weight")]
        return [name.removesuffix(".weight") for name in names if len(opened.get_slice(name).get_shape()) == 2]


def may_be_adapted(name: str) -> bool:
    """Return whether a matrix may get an adapter: embeddings, heads and vision towers get none."""
    return name.rpartition(".")[2] not in UNADAPTED and not is_of_vision(name)


def check_targets(lora_target: str, layers: Sequence[str]) -> None:
    """Raise ConfigError if a name in `lora_target` is the end of the name of none of the layers."""
    targets = [name.strip() for name in lora_target.split(",")]
    lost = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in layers)]
    if lost and targets != ALL_LINEAR:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        problem = f"the model has no linear layer named {' or '.join(lost)} that can be adapted"
        remedy = f"use all-linear, or names of this list: {known}"
        raise ConfigError(Fault("model_args.lora_target", problem, remedy, "unknown_name"))


def unreadable(path: str, what: str, error: Exception) -> Fault:
    """Return the fault of a model or tokenizer that cannot be loaded."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    where = "" if Path(path).exists() else " (there is no such folder here, and it could not be loaded from the Hub)"
    problem = f"the {what} '{path}' cannot be read{where}: {first_line}"
    remedy = "set it to the folder or Hub name of a causal language model"
    if "trust_remote_code" in str(error):
        remedy = "set model_args.trust_remote_code to true in each role with this model, if you trust its Python code"
    return Fault("pretrain", problem, remedy, "unreadable")
