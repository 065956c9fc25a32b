"""The models of distillation: a teacher that returns its last hidden states or its top k tokens, and a student compared
with it.

Divergence from a teacher over the whole vocabulary, computed from hidden states as `head.py` computes log-probs.

The logits of student and teacher are computed for a fixed number of tokens at a time, compared, and freed. The backward
pass recomputes them. A teacher's output is sent and stored as hidden states [S, H] or as its top k tokens, never as
logits [S, V].

The top-k output of a teacher, which it can send instead of hidden states: its k most probable tokens, and all other
tokens combined.

Both distributions are reduced to k + 1 categories: the top k tokens and the tail. By the data-processing inequality,
the divergence of the reduced distributions is at most the full divergence. It grows with k, and equals the full
divergence if k is the size of the vocabulary. KL(P || Q) loses the term P(tail) KL(P || Q given the tail), and KL(Q ||
P) loses Q(tail) KL(Q || P given the tail). In contrast, renormalising over the top k tokens, or ignoring the tail,
would not penalise the probability that the student assigns to the tail. Source: SDPO, arXiv 2601.20802, and TA-OPD,
arXiv 2608.14728.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from roll.algorithms.divergence import Divergence
from roll.config.plan.memory import head_tokens
from roll.config.schema.model import ModelConfig
from roll.errors import DataError, Fault
from roll.models.load import DTYPES, load_policy
from roll.models.logits import AS_THEY_ARE, FinalLogits, final_logits
from roll.models.packed import PackedInputs, PackedModel, PackedPolicy, add_product, logits_of
from roll.models.weight_files import unreadable
from roll.stores.models import local_model

EXACT = 1 << 24
"""Largest n such that fp32 represents all integers from 0 to n exactly. Token ids are sent as fp32."""


@dataclass(frozen=True)
class TeacherTop:
    """Selects and encodes the log-probs that a teacher sends."""

    count: int
    """k, at most `rows`."""
    rows: int
    """Number of rows that both output matrices have. The distributions are over these tokens."""
    temperature: float
    """Divisor of the logits."""

    def __post_init__(self) -> None:
        assert 0 < self.count <= self.rows <= EXACT, f"top {self.count} of {self.rows}"

    @property
    def width(self) -> int:
        """Return the number of fp32 values per token."""
        return 2 * self.count + (self.count < self.rows)

    def encode(self, logits: Tensor) -> Tensor:
        """Encode logits [K, rows] as fp32 [K, width].

        A row has the descending log-probs of the top k tokens, the log-prob of all other tokens together (if any), and
        the top k token ids.
        """
        log_probs = (logits / self.temperature).log_softmax(-1)
        token_ids = log_probs.topk(self.count).indices
        return torch.cat([in_buckets(log_probs, token_ids).float(), token_ids.float()], -1)

    def decode(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs [K, k + 1], or [K, k] if k equals `rows`, and token ids int64 [K, k]."""
        return encoded[:, : -self.count], encoded[:, -self.count :].long()


def in_buckets(log_probs: Tensor, token_ids: Tensor) -> Tensor:
    """Reduce log-probs [K, V] to log-probs [K, k + 1] of the given tokens [K, k] and of all other tokens together.

    If there are no other tokens, the result is [K, k]. The probabilities of the other tokens are summed, because 1
    minus the rest would be inaccurate for a small tail.
    """
    chosen = log_probs.gather(-1, token_ids)
    if token_ids.shape[-1] == log_probs.shape[-1]:
        return chosen
    others = log_probs.scatter(-1, token_ids, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], -1)


Compare = Callable[[Tensor, Tensor], Tensor]
"""From the student's fp32 logits [K, R] and the teacher's output for these tokens [K, ...] to divergences [K], nats."""
TENSORS = 8
"""Number of logit-sized tensors that a comparison keeps in memory. Log-probs need two."""


def chunked_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    measure: Divergence,
    final: FinalLogits = AS_THEY_ARE,
    teacher_final: FinalLogits = AS_THEY_ARE,
) -> Tensor:
    """Return the divergences [S], in nats, between final(hidden @ weight.T) and the teacher's logits. Differentiable in
    hidden and weight.

    If one output matrix has more rows, because it is padded to a round number, both distributions are restricted to the
    rows that both matrices have.

    Args:
        hidden: [S, H].
        weight: [V, H].
        teacher_hidden: [S, H'].
        teacher_weight: [V', H'].
        final, teacher_final: How the student and the teacher change their logits.
    """
    rows = min(len(weight), len(teacher_weight))

    def compare(student: Tensor, states: Tensor) -> Tensor:
        return measure(final(student), teacher_final(logits_of(states, teacher_weight[:rows])))

    return _ChunkedDivergence.apply(hidden, weight, teacher_hidden, compare, rows)


def chunked_top_divergence(
    hidden: Tensor,
    weight: Tensor,
    encoded: Tensor,
    top: TeacherTop,
    measure: Divergence,
    final: FinalLogits = AS_THEY_ARE,
) -> Tensor:
    """Return the divergences [S], in nats, over k + 1 categories: the teacher's top k tokens, and all other tokens
    together.

    Differentiable in hidden and weight.

    Args:
        hidden: [S, H].
        weight: [V, H].
        encoded: fp32 [S, top.width], see `TeacherTop.encode`.
        final: How the student changes its logits.
    """

    def compare(student: Tensor, part: Tensor) -> Tensor:
        p, token_ids = top.decode(part)
        return measure.between(in_buckets((final(student) / top.temperature).log_softmax(-1), token_ids), p)

    return _ChunkedDivergence.apply(hidden, weight, encoded, compare, top.rows)


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, compare: Compare, rows: int) -> Tensor:
        out = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for part in chunks(len(hidden), len(weight)):
            out[part] = compare(logits_of(hidden[part], weight[:rows]), teacher[part])
        # Keep a reference to the weight instead of saving it, because ZeRO-3 gathers its storage again for the backward
        # pass.
        ctx.weight, ctx.compare, ctx.rows = weight, compare, rows
        ctx.save_for_backward(hidden, teacher)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, teacher = ctx.saved_tensors
        weight: Tensor = ctx.weight
        rows: int = ctx.rows
        grad_hidden = torch.empty_like(hidden)
        grad_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        )
        for part in chunks(len(hidden), len(weight)):
            student = logits_of(hidden[part], weight[:rows])
            with torch.enable_grad():
                student.requires_grad_()
                (slope,) = torch.autograd.grad(ctx.compare(student, teacher[part]), student, grad[part])
            slope = slope.to(weight.dtype)
            torch.mm(slope, weight[:rows], out=grad_hidden[part])
            if grad_weight is not None:
                add_product(grad_weight[:rows], slope.t(), hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Split the tokens into slices. The logits of one slice are computed and compared at a time."""
    size = max(16, head_tokens(vocabulary) * 2 // TENSORS)
    return [slice(start, start + size) for start in range(0, tokens, size)]


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
        head = self.head

        def encode(hidden: Tensor, weight: Tensor) -> Tensor:
            out = torch.empty(len(hidden), self.top.width, device=hidden.device)
            for part in chunks(len(hidden), len(weight)):
                out[part] = self.top.encode(head.final(logits_of(hidden[part], weight[: self.top.rows])))
            return out

        # Call the head only once, so that with ZeRO-3 every rank gathers its weight once, for any number of tokens.
        return (head(self.hidden(inputs).index_select(0, inputs.scored - 1), more=encode),)


class PackedTopStudent(PackedPolicy):
    """A policy that also returns the divergence from a teacher, given the teacher's top k."""

    def __init__(self, model: PreTrainedModel | PeftModel, top: TeacherTop, measure: Divergence) -> None:
        super().__init__(model)
        self.top, self.measure = top, measure

    def forward(self, inputs: PackedInputs) -> tuple[Tensor, ...]:
        """Return the outputs of `PackedStudent.forward`. `inputs.teacher_states` is the teacher's encoded top k."""
        encoded = inputs.teacher_states
        if encoded is None:
            return super().forward(inputs)
        top, measure, final = self.top, self.measure, self.head.final
        return self.scored(
            inputs, lambda hidden, weight: chunked_top_divergence(hidden, weight, encoded, top, measure, final)
        )


class PackedStudent(PackedPolicy):
    """A policy that also returns the divergence from a teacher, given the teacher's last hidden states."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        teacher_weight: Tensor,
        measure: Divergence,
        teacher_final: FinalLogits = AS_THEY_ARE,
    ) -> None:
        """`teacher_weight` is the teacher's output matrix [V, H], `teacher_final` how it changes its logits."""
        super().__init__(model)
        self.teacher_final = teacher_final
        self.register_buffer("teacher_weight", teacher_weight, persistent=False)
        self.measure = measure

    def forward(self, inputs: PackedInputs) -> tuple[Tensor, ...]:
        """Return log-probs, entropies and divergences at `inputs.scored`, fp32 [S], nats; none without a teacher."""
        states = inputs.teacher_states
        if states is None:
            return super().forward(inputs)
        weight = self.get_buffer("teacher_weight")

        def compare(hidden: Tensor, own_weight: Tensor) -> Tensor:
            finals = self.head.final, self.teacher_final
            return chunked_divergence(hidden, own_weight, states.to(weight.dtype), weight, self.measure, *finals)

        return self.scored(inputs, compare)


def load_student(
    path: str,
    model_args: ModelConfig,
    seed: int,
    teacher: str,
    names: Sequence[str],
    dtype: str,
    measure: Divergence,
    teacher_final: FinalLogits = AS_THEY_ARE,
) -> PackedStudent:
    """Load the policy, and the output matrix of its teacher from the folder or Hub name `teacher`.

    Raises the same errors as `load_policy` and `read_tensor`.
    """
    weight = read_tensor(teacher, names).to(DTYPES[dtype])
    return PackedStudent(load_policy(path, model_args, seed).model, weight, measure, teacher_final)


def student_loader(
    teacher: str, teacher_args: ModelConfig, measure: Divergence
) -> Callable[[str, ModelConfig, int], PackedStudent]:
    """Return `load_student` with its arguments about the teacher already bound, so that it can be sent to another
    process.

    Raises:
        DataError: the teacher's configuration cannot be read.
    """
    path, trusted = local_model(teacher), teacher_args.trust_remote_code
    names, final = output_names(path, trusted), final_logits(_without_weights(path, trusted)[0])
    given = {"teacher": teacher, "names": names, "dtype": teacher_args.dtype, "measure": measure}
    return partial(load_student, **given, teacher_final=final)


def load_top_student(
    path: str, model_args: ModelConfig, seed: int, top: TeacherTop, measure: Divergence
) -> PackedTopStudent:
    """Load the policy. It needs no weights of the teacher. Raises the same errors as `load_policy`."""
    return PackedTopStudent(load_policy(path, model_args, seed).model, top, measure)


def _without_weights(path: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Build a model on the meta device, without weights. Raises DataError if its configuration cannot be read."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(unreadable(path, "model", error)) from error
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def output_rows(path: str, trust_remote_code: bool) -> int:
    """Return the number of rows of a model's output matrix. Raises DataError if the configuration cannot be read."""
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
    """Load the first tensor of these names from the safetensors of a folder, Hub name or store. Raises DataError for
    none, StoreError if the store fails.
    """
    path = local_model(path)
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
        Fault(
            "teacher.model_args.model_name_or_path",
            problem,
            "save the model as safetensors with save_pretrained",
            "not_found",
        )
    )
