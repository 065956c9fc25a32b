"""The models of distillation: a teacher that returns its last hidden states or its top k tokens, and a student compared
with it.
"""

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
from roll.models.divergence import chunked_divergence, chunked_top_divergence, chunks
from roll.models.head import LogProbHead, logits_of
from roll.models.load import DTYPES, PackedInputs, PackedModel, PackedPolicy, load_policy, unreadable
from roll.models.teacher_top import TeacherTop

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class PackedTeacher(PackedModel):
    """A model whose forward pass returns the last hidden states that predict the scored tokens."""

    def forward(self, inputs: PackedInputs) -> tuple[Tensor]:
        """Return the last hidden states [S, H] of the tokens before `inputs.scored`."""
        return (self.hidden(inputs).index_select(0, inputs.scored - 1),)


class PackedTopTeacher(PackedModel):
    """A model whose forward pass returns the most probable tokens instead of log-probs of the scored tokens."""

    def __init__(self, model: PreTrainedModel, top: TeacherTop) -> None:
        super().__init__(model)
        self.top = top

    def forward(self, inputs: PackedInputs) -> tuple[Tensor]:
        """Return fp32 [S, width], see `TeacherTop.encode`. Logits are computed for a few tokens at a time."""
        head = self.causal.get_output_embeddings()
        assert isinstance(head, LogProbHead)

        def encode(hidden: Tensor, weight: Tensor) -> Tensor:
            out = torch.empty(len(hidden), self.top.width, device=hidden.device)
            for part in chunks(len(hidden), len(weight)):
                out[part] = self.top.encode(logits_of(hidden[part], weight[: self.top.rows]))
            return out

        # Call the head only once, so that with ZeRO-3 every rank gathers its weight once, for any number of tokens.
        return (head(self.hidden(inputs).index_select(0, inputs.scored - 1), more=encode),)


class PackedTopStudent(PackedPolicy):
    """A policy that also returns the divergence from a teacher, given the teacher's top k."""

    def __init__(self, model: PreTrainedModel | PeftModel, top: TeacherTop, measure: Divergence) -> None:
        super().__init__(model)
        self.top, self.measure = top, measure

    def forward(self, inputs: PackedInputs) -> tuple[Tensor, ...]:
        """Return the same outputs as `PackedStudent.forward`. `inputs.teacher_states` is the teacher's encoded top
        k.
        """
        encoded = inputs.teacher_states
        if encoded is None:
            return super().forward(inputs)
        return self.scored(
            inputs, lambda hidden, weight: chunked_top_divergence(hidden, weight, encoded, self.top, self.measure)
        )


class PackedStudent(PackedPolicy):
    """A policy that also returns the divergence from a teacher, given the teacher's last hidden states."""

    def __init__(self, model: PreTrainedModel | PeftModel, teacher_weight: Tensor, measure: Divergence) -> None:
        """`teacher_weight` is the teacher's output matrix [V, H]."""
        super().__init__(model)
        self.register_buffer("teacher_weight", teacher_weight, persistent=False)
        self.measure = measure

    def forward(self, inputs: PackedInputs) -> tuple[Tensor, ...]:
        """Return log-probs, entropies and divergences at `inputs.scored`, fp32 [S] each, in nats; no divergences
        without teacher states.
        """
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
    """Load the policy, and the output matrix of its teacher from the folder or Hub name `teacher`.

    Raises the same errors as `load_policy` and `read_tensor`.
    """
    return PackedStudent(
        load_policy(path, model_args, seed).model, read_tensor(teacher, names).to(DTYPES[dtype]), measure
    )


def student_loader(
    teacher: str, teacher_args: ModelConfig, measure: Divergence
) -> Callable[[str, ModelConfig, int], PackedStudent]:
    """Return `load_student` with its arguments about the teacher already bound, so that it can be sent to another
    process.

    Raises:
        DataError: the teacher's configuration cannot be read.
    """
    names = output_names(teacher, teacher_args.trust_remote_code)
    return partial(load_student, teacher=teacher, names=names, dtype=teacher_args.dtype, measure=measure)


def load_top_student(
    path: str, model_args: ModelConfig, seed: int, top: TeacherTop, measure: Divergence
) -> PackedTopStudent:
    """Load the policy. It needs no weights of the teacher. Raises the same errors as `load_policy`."""
    return PackedTopStudent(load_policy(path, model_args, seed).model, top, measure)


def _without_weights(path: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load a model's configuration, and build the model on the meta device, without allocating its weights.

    Raises:
        DataError: the configuration cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError([unreadable(path, "model", error)]) from error
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def output_rows(path: str, trust_remote_code: bool) -> int:
    """Return the number of rows of a model's output matrix.

    Raises:
        DataError: the configuration cannot be read.
    """
    return len(_without_weights(path, trust_remote_code)[1].get_output_embeddings().weight)


def output_names(path: str, trust_remote_code: bool) -> list[str]:
    """Return possible names of the output matrix in a model's weight files: its own name, and that of the embedding if
    they are tied.

    Raises:
        DataError: the configuration cannot be read.
    """
    config, model = _without_weights(path, trust_remote_code)
    found: list[Any] = [model.get_output_embeddings()]
    if config.get_text_config().tie_word_embeddings:
        found.append(model.get_input_embeddings())
    parameters = list(model.named_parameters(remove_duplicate=False))
    return list(dict.fromkeys(name for module in found for name, parameter in parameters if parameter is module.weight))


def read_tensor(path: str, names: Sequence[str]) -> Tensor:
    """Load the first tensor with one of these names from the safetensors files of a folder or Hub name.

    Raises:
        DataError: no file has such a tensor.
    """
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    index = cached_file(path, INDEX, **quiet)
    where = json.loads(Path(index).read_text())["weight_map"] if index else dict.fromkeys(names, SINGLE)
    for name in names:
        file = cached_file(path, where[name], **quiet) if name in where else None
        if file is None:
            continue
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118  safe_open does not support `in`
                return tensors.get_tensor(name)
    problem = f"'{path}' has no safetensors file with the tensor {' or '.join(names)}"
    raise DataError(
        [Fault("teacher.model_args.model_name_or_path", problem, "save the model as safetensors with save_pretrained")]
    )
