"""Distillation's two models: a teacher that says its last hidden states, and a student that compares itself with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from roll.algorithms.divergence import Divergence
from roll.config.schema.model import ModelConfig
from roll.errors import DataError, Fault
from roll.models.divergence import chunked_divergence
from roll.models.load import DTYPES, PackedInputs, PackedModel, PackedPolicy, load_policy, unreadable

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class PackedTeacher(PackedModel):
    """A model whose forward pass yields the states from which chosen tokens are predicted."""

    def forward(self, inputs: PackedInputs) -> tuple[Tensor]:
        """[S, H]: before the output matrix, of the token before each of `inputs.scored`."""
        return (self.hidden(inputs).index_select(0, inputs.scored - 1),)


class PackedStudent(PackedPolicy):
    """A policy that also says how far its distributions are from a teacher's, where it is given the teacher's states."""

    def __init__(self, model: PreTrainedModel | PeftModel, teacher_weight: Tensor, measure: Divergence) -> None:
        """`teacher_weight`: the teacher's output matrix [V, H]."""
        super().__init__(model)
        self.register_buffer("teacher_weight", teacher_weight, persistent=False)
        self.measure = measure

    def forward(self, inputs: PackedInputs) -> tuple[Tensor, ...]:
        """fp32 [S] log-probs, entropies and divergences, in nats, at `inputs.scored`."""
        states = inputs.teacher_states
        if states is None:
            return super().forward(inputs)
        weight = self.get_buffer("teacher_weight")

        def compare(hidden: Tensor, own_weight: Tensor) -> Tensor:
            return chunked_divergence(hidden, own_weight, states.to(weight.dtype), weight, self.measure)

        return self.scored(inputs, compare)


def load_student(
    path: str, model_args: ModelConfig, seed: int, teacher: str, names: Sequence[str], dtype: str, measure: Divergence
) -> PackedStudent:
    """The policy beside its teacher's output matrix, which is read from the folder or Hub name `teacher`. Raises as `load_causal_model`."""
    return PackedStudent(load_policy(path, model_args, seed).model, read_tensor(teacher, names).to(DTYPES[dtype]), measure)


def student_loader(teacher: str, teacher_args: ModelConfig, measure: Divergence) -> Callable[[str, ModelConfig, int], PackedStudent]:
    """`load_student` with what it needs to know of the teacher, for another process.

    Raises:
        DataError: the teacher's configuration cannot be read.
    """
    names = output_names(teacher, teacher_args.trust_remote_code)
    return partial(load_student, teacher=teacher, names=names, dtype=teacher_args.dtype, measure=measure)


def output_names(path: str, trust_remote_code: bool) -> list[str]:
    """Names that a model's checkpoint may give its output matrix: its own, and where it is the embedding too, that one's."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError([unreadable(path, "model", error)]) from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    found: list[Any] = [model.get_output_embeddings()]
    if config.get_text_config().tie_word_embeddings:
        found.append(model.get_input_embeddings())
    parameters = list(model.named_parameters(remove_duplicate=False))
    return list(dict.fromkeys(name for module in found for name, parameter in parameters if parameter is module.weight))


def read_tensor(path: str, names: Sequence[str]) -> Tensor:
    """The first tensor of these names in the safetensors files of a folder or Hub name.

    Raises:
        DataError: there is none.
    """
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    index = cached_file(path, INDEX, **quiet)
    where = json.loads(Path(index).read_text())["weight_map"] if index else dict.fromkeys(names, SINGLE)
    for name in names:
        file = cached_file(path, where[name], **quiet) if name in where else None
        if file is None:
            continue
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118  it is no mapping
                return tensors.get_tensor(name)
    problem = f"'{path}' holds no safetensors file with {' or '.join(names)}"
    raise DataError([Fault("teacher.model_args.model_name_or_path", problem, "save the model as safetensors: save_pretrained")])
