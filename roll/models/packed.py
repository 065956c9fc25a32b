"""A causal model over packed sequences: its inputs, its forward pass, its head, and the scores of given sequences.

Ragged numpy sequences become model inputs, and model outputs become numpy arrays again. All strategies share this.

The head computes log-probs and entropy without a tensor of shape [tokens, vocabulary]. Logits are computed in chunks of
a fixed number of logits, reduced to a few numbers per token, and freed. The backward pass recomputes them, except for
the last chunk, which is kept and processed first. So memory grows neither with the micro-batch nor with the vocabulary.
Logits are accumulated and reduced in fp32 even if weights are bf16, because this precision determines how closely the
trainer's log-probs match the engine's. On CUDA, the passes over the logits are compiled: the forward pass reads them
twice, and the backward pass reads them once and writes bf16 once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig, PreTrainedModel

from roll.backend import Rank
from roll.config.plan.memory import head_tokens
from roll.models.logits import AS_THEY_ARE, FinalLogits
from roll.models.memory_guard import FEWER_TOKENS, readable_memory_errors
from roll.models.offload import Offload, tensors_in
from roll.models.pictures import PictureTower, ShownPictures, positions, sees, shown_pictures, to_device
from roll.models.replay import RouteReplay
from roll.models.sequence_parallel import BY_LENGTH, SequenceGroup, TokenShare, gather_values
from roll.types import Floats, Sequences


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch on the model's device."""

    token_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64, positions within each sequence, starting at 0; [3, T] with pictures whose positions follow a grid."""
    cu_seq_lens: Tensor
    """[N + 1] int32, start of each sequence, and the end of the last one."""
    max_length: int
    """Number of tokens of the longest sequence."""
    scored: Tensor
    """[S] int64, positions t > 0 of the tokens to score. Token t is predicted from the state at t - 1."""
    temperature: float = 1.0
    """Divisor of the logits."""
    teacher_states: Tensor | None = None
    """fp32 [S, H'], the teacher's output for the scored tokens, or for those of this rank's share; or None."""
    routes: Tensor | None = None
    """int16 [T, layers, k], the routes to replay, or None. See `models.replay`."""
    share: TokenShare | None = None
    """The tokens that this rank runs through the layers, with sequence parallelism. T is then padded to a multiple of
    the number of ranks. The padding is a separate sequence without scored tokens.
    """
    shown: ShownPictures | None = None
    """The pictures of the micro-batch. None without any."""


def packed_inputs(
    sequences: Sequences,
    device: str,
    temperature: float = 1.0,
    teacher_states: Floats | None = None,
    over: SequenceGroup | None = None,
) -> PackedInputs:
    """Return the micro-batch as model inputs on `device`. The response mask must not contain the first token of a
    sequence.

    Args:
        teacher_states: [S, H'], the teacher's output for the response tokens.
        over: The ranks that split the tokens of the micro-batch, with sequence parallelism.
    """
    assert not sequences.response_mask[sequences.offsets[:-1]].any(), (
        "the first token of a sequence cannot be a response token"
    )
    scored, share = np.flatnonzero(sequences.response_mask), None
    if over is not None:
        sequences = filled_up(sequences, over.size)
        share = TokenShare(over, len(sequences.token_ids) // over.size, scored)
        teacher_states = None if teacher_states is None else teacher_states[share.rows(back=1)]
    pictures = sequences.shown
    assert pictures is None or over is None, "pictures are not split over ranks"

    return PackedInputs(
        token_ids=to_device(sequences.token_ids.astype(np.int64), device),
        position_ids=to_device(positions(sequences), device),
        cu_seq_lens=to_device(sequences.offsets.astype(np.int32), device),
        max_length=int(sequences.lengths.max()),
        scored=to_device(scored, device),
        temperature=temperature,
        teacher_states=None if teacher_states is None else to_device(teacher_states, device),
        routes=None if sequences.routes is None else to_device(sequences.routes, device),
        share=share,
        shown=None if pictures is None else shown_pictures(pictures, sequences.offsets, device),
    )


def filled_up(sequences: Sequences, multiple: int) -> Sequences:
    """Pad the number of tokens to a multiple. The padding is a separate sequence outside the response mask."""
    missing = -len(sequences.token_ids) % multiple
    if not missing:
        return sequences
    offsets = np.append(sequences.offsets, len(sequences.token_ids) + missing)
    routes = sequences.routes
    routes = None if routes is None else np.pad(routes, ((0, missing), (0, 0), (0, 0)), constant_values=-1)
    return Sequences(
        np.pad(sequences.token_ids, (0, missing)), offsets, np.pad(sequences.response_mask, (0, missing)), routes
    )


def scored_only(field: Floats, sequences: Sequences, device: str) -> Tensor:
    """Return the values of a per-token field [T] at the response tokens, fp32 [S] on `device`."""
    return to_device(field[sequences.response_mask].astype(np.float32, copy=False), device)


def spread_to_tokens(values: Tensor, sequences: Sequences) -> Floats:
    """Return an array [T] with the values [S] at the response tokens and 0 elsewhere."""
    out = np.zeros(len(sequences.token_ids), np.float32)
    out[sequences.response_mask] = values.float().cpu().numpy()
    return out


def longest_packable(config: PreTrainedConfig) -> int | None:
    """Return the sequence length up to which the rotary embedding does not depend on the longest sequence in the row.

    None if it never depends on it.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") not in BY_LENGTH:
        return None
    known = (rope.get("original_max_position_embeddings"), getattr(text, "original_max_position_embeddings", None))
    return next((length for length in known if length), text.max_position_embeddings)


class PackedModel(nn.Module):
    """A causal transformer over packed sequences. Subclasses define the outputs.

    The forward pass accepts `PackedInputs` and returns a tuple of tensors with one row per scored token. Scoring uses
    the first one.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model
        self._longest = longest_packable(self.causal.config)
        self.replay: RouteReplay | None = None
        """Replays the routes of the inputs. Without it, they are ignored."""
        self.tower = PictureTower(self.causal) if sees(self.causal) else None
        """Runs the part of the model that sees pictures. None for a model of text alone."""

    @property
    def causal(self) -> PreTrainedModel:
        """Return the transformers model, without its adapter wrapper if there is one."""
        causal = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        assert isinstance(causal, PreTrainedModel)
        return causal

    @property
    def head(self) -> LogProbHead:
        """Return the head of a language model."""
        head = self.causal.get_output_embeddings()
        assert isinstance(head, LogProbHead)
        return head

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """Return the normalised states of the last layer, [T, H], or only those of the rank's share. State t depends on
        tokens up to t.

        Raises:
            ValueError: a sequence is too long for packing; see `longest_packable`.
        """
        if self._longest is not None and inputs.max_length > self._longest:
            problem = (
                f"sequences of {inputs.max_length} tokens exceed {self._longest}, the longest that this model supports "
                f"when packed"
            )
            raise ValueError(
                f"{problem}, because its rotary embedding depends on the length: shorten prompt_length and "
                f"response_length, or max_length"
            )
        mine = slice(None) if inputs.share is None else inputs.share.tokens
        if self.replay:
            self.replay.begin(None if inputs.routes is None else inputs.routes[mine])
        token_ids, position_ids = inputs.token_ids[mine], inputs.position_ids[..., mine]
        assert self.tower or inputs.shown is None, "the model sees no pictures"
        seen, unseen = self.tower.inputs(inputs.shown, token_ids.device) if self.tower else ({}, None)
        states = self.causal.base_model(
            input_ids=token_ids[None],
            position_ids=position_ids[..., None, :],
            use_cache=False,
            cu_seq_lens_q=inputs.cu_seq_lens,
            cu_seq_lens_k=inputs.cu_seq_lens,
            max_length_q=inputs.max_length,
            max_length_k=inputs.max_length,
            **seen,
            **({} if inputs.share is None else {"over": inputs.share.group}),
        ).last_hidden_state[0]
        return states if unseen is None else states + unseen.to(states.dtype)

    def of_scored(
        self, inputs: PackedInputs, back: int, compute: Callable[[Tensor, slice], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Return the outputs of `compute`, [S] each, for the states `back` tokens before the scored tokens.

        `compute` is called with states [K, H] and the slice of the scored tokens that they belong to: all, or those of
        this rank's share.
        """
        share, hidden = inputs.share, self.hidden(inputs)
        # Unlike indexing, index_select does not sort the rows in its backward pass.
        if share is None:
            return compute(hidden.index_select(0, inputs.scored - back), slice(None))
        rows = share.rows(back)
        states = hidden.index_select(0, inputs.scored[rows] - back - share.tokens.start)
        return gather_values(compute(states, rows), share.counts(back), share.group)


class PackedPolicy(PackedModel):
    """A model whose forward pass returns log-probs and entropies of chosen tokens instead of logits."""

    def forward(self, inputs: PackedInputs) -> tuple[Tensor, ...]:
        """Return fp32 [S] log-probs and fp32 [S] entropies of the tokens at `inputs.scored`."""
        return self.scored(inputs)

    def scored(
        self, inputs: PackedInputs, more: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs of `forward`, followed by the result of `more` if given.

        `more` is called with hidden states [S, H], or those of this rank's share, and the output matrix [V, H].
        """
        head, targets = self.head, inputs.token_ids[inputs.scored]
        return self.of_scored(inputs, 1, lambda states, rows: head(states, targets[rows], inputs.temperature, more))


class LogProbHead(nn.Module):
    """Replaces a causal model's `lm_head` and shares its weight.

    Because it is a module, calling it triggers ZeRO-3's hooks, which gather the sharded weight during the forward pass
    and again during the backward pass.
    """

    def __init__(self, lm_head: nn.Linear, final: FinalLogits = AS_THEY_ARE) -> None:
        """Take the weight of `lm_head`. `final` is how the model changes its logits."""
        super().__init__()
        if lm_head.bias is not None:
            raise ValueError("models whose lm_head has a bias are not supported")
        self.weight = lm_head.weight
        self.final = final
        self.in_features, self.out_features = lm_head.in_features, lm_head.out_features

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        more: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Any:
        """Return log-probs and entropies of the targets, or logits without targets.

        Args:
            hidden: [T, H], or [..., H] without targets.
            targets: [T], token ids whose log-probs to return.
            temperature: Divisor of the logits.
            more: Another function of the hidden states and the weight, called while the weight is gathered.

        Returns:
            With targets: log-probs fp32 [T] (natural log) and entropies fp32 [T] (nats), followed by the result of
                `more` if given.
            Without targets: the result of `more` if given, otherwise products [..., V] as `nn.Linear` returns them. The
                model of transformers changes them itself.
        """
        if targets is None:
            return nn.functional.linear(hidden, self.weight) if more is None else more(hidden, self.weight)
        found = chunked_log_probs(hidden, self.weight, targets, temperature, self.final)
        return found if more is None else (*found, more(hidden, self.weight))


def chunked_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, final: FinalLogits = AS_THEY_ARE
) -> tuple[Tensor, Tensor]:
    """Return log softmax(final(hidden @ weight.T) / temperature) at the targets, and the entropy of the softmax. Both
    are differentiable.

    Args:
        hidden: [T, H].
        weight: [V, H].
        targets: [T] integer.

    Returns:
        fp32 [T] log-probs and fp32 [T] entropies, natural log.
    """
    return _ChunkedLogProbs.apply(hidden, weight, targets, temperature, final)


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden @ weight.T in fp32, accumulated in fp32."""
    if weight.dtype == torch.float32:
        return hidden @ weight.t()
    if weight.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden.float() @ weight.float().t()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the fp32 tensor `total` in place. Products of any dtype are accumulated in fp32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def scaled_logits(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Return `logits * scale`, or with a cap `cap * tanh(logits * scale / cap)`."""
    scaled = logits * scale
    return scaled if cap is None else cap * (scaled / cap).tanh()


def token_statistics(
    logits: Tensor, targets: Tensor, scale: float, cap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's log-prob, log partition and entropy, fp32 [T] each, for `scaled_logits` of fp32 [T, V]."""
    scaled = scaled_logits(logits, scale, cap)
    largest = scaled.amax(dim=-1, keepdim=True)
    shifted = scaled - largest
    exponentials = shifted.exp()
    total = exponentials.sum(dim=-1)
    log_total = total.log()
    log_z = log_total + largest[:, 0]
    log_probs = scaled_logits(logits.gather(1, targets[:, None])[:, 0], scale, cap) - log_z
    return log_probs, log_z, log_total - (exponentials * shifted).sum(dim=-1) / total


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    cap: float | None = None,
) -> Tensor:
    """Return the gradient of the loss with respect to the logits, [T, V] in `dtype`.

    For z = `scaled_logits`: d log p_y / dz = onehot(y) - p and d entropy / dz = -p (log p + entropy). The slope of z is
    `scale`, times 1 - (z / cap)^2 with a cap.
    """
    scaled = scaled_logits(logits, scale, cap)
    log_p = scaled - log_z[:, None]
    slope = -grad_log_probs[:, None]
    if grad_entropy is not None:
        slope = slope - grad_entropy[:, None] * (log_p + entropy[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = (log_p.exp() * slope + torch.where(is_target, grad_log_probs[:, None], 0.0)) * scale
    return (gradient if cap is None else gradient * (1 - (scaled / cap) ** 2)).to(dtype)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function wrapped in torch.compile. Each function is wrapped only once."""
    return torch.compile(function)


def _fused(function: Callable[..., Any], logits: Tensor, *rest: Any) -> Any:
    """Call a pure function on a chunk. On CUDA it is compiled for this vocabulary size and any number of tokens."""
    if not logits.is_cuda:
        return function(logits, *rest)
    for tensor in (logits, *rest):
        if isinstance(tensor, Tensor):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return compiled(function)(logits, *rest)


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Return the chunks. An incomplete one comes first, so that the last, whose logits are kept, is full."""
    size = head_tokens(vocabulary)
    return [slice(max(0, end - size), end) for end in range(tokens % size or size, tokens + 1, size)]


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, final: FinalLogits
    ) -> tuple[Tensor, Tensor]:
        scale, cap = final.factor / temperature, None if final.cap is None else final.cap / temperature
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        log_z = torch.empty_like(log_probs)
        logits = None
        for part in _chunks(len(hidden), len(weight)):
            logits = None  # free them before the next chunk's logits are computed
            logits = logits_of(hidden[part], weight)
            log_probs[part], log_z[part], entropy[part] = _fused(token_statistics, logits, targets[part], scale, cap)
        ctx.last_logits = logits if any(ctx.needs_input_grad) else None
        # Keep a reference to the weight instead of saving it, because ZeRO-3 gathers its storage again for the backward
        # pass.
        ctx.weight = weight
        ctx.scale, ctx.cap = scale, cap
        ctx.save_for_backward(hidden, targets, log_z, entropy)
        # If no loss uses the entropy, its gradient is None instead of zeros, which saves computation.
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, targets, log_z, entropy = ctx.saved_tensors
        weight: Tensor = ctx.weight
        slopes = torch.zeros_like(log_z) if grad_log_probs is None else grad_log_probs
        grad_hidden = torch.empty_like(hidden)
        grad_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        )
        logits, ctx.last_logits = ctx.last_logits, None
        for part in reversed(_chunks(len(hidden), len(weight))):
            slopes_of_entropy = None if grad_entropy is None else grad_entropy[part]
            given = (
                targets[part],
                log_z[part],
                entropy[part],
                slopes[part],
                slopes_of_entropy,
                ctx.scale,
                weight.dtype,
                ctx.cap,
            )
            grad_logits = _fused(logit_gradient, logits_of(hidden[part], weight) if logits is None else logits, *given)
            logits = None
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[part])
            del grad_logits  # free it before the next chunk's logits are computed
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


Forward = Callable[[PackedInputs], tuple[Tensor, ...]]
"""Forward pass of a `PackedModel` or of an engine around it."""


def score(
    forward: Forward,
    micro_batches: Sequence[Sequences],
    temperature: float,
    rank: Rank,
    over: SequenceGroup | None = None,
) -> list[Floats]:
    """Return the first output of `forward` for each micro-batch, as [T] with 0 outside the response mask. The caller
    disables gradients.

    Args:
        over: The ranks that split the tokens of each micro-batch, with sequence parallelism.

    Raises:
        DeviceMemoryError: a micro-batch is too large for the device.
    """
    with readable_memory_errors(rank, "scoring", FEWER_TOKENS):
        # Read results only after all micro-batches are queued, so that the device does not wait for the host between
        # them.
        scores = [forward(packed_inputs(part, rank.device, temperature, over=over))[0] for part in micro_batches]
    return [spread_to_tokens(values, part) for values, part in zip(scores, micro_batches, strict=True)]


def states(forward: Forward, micro_batches: Sequence[Sequences], rank: Rank) -> list[Floats]:
    """Return a teacher's output for the S response tokens of each micro-batch: hidden states [S, H], or its encoded top
    k.

    Raises:
        DeviceMemoryError: a micro-batch is too large for the device.
    """
    with readable_memory_errors(rank, "computing the teacher's states", FEWER_TOKENS):
        return [forward(packed_inputs(part, rank.device))[0].float().cpu().numpy() for part in micro_batches]


class PackedScore:
    """Base class of scoring strategies. Scores with a loaded model, or with a teacher model as a `TeachStrategy`."""

    def __init__(self, policy: PackedModel, forward: Forward, rank: Rank, offload: Offload) -> None:
        """Store the model. `forward` runs `policy` in eval mode: it is the model itself, or an engine around it."""
        self._policy, self._forward, self._rank, self._offload = policy, forward, rank, offload

    @torch.no_grad()
    def log_probs(self, micro_batches: Sequence[Sequences], temperature: float) -> list[Floats]:
        """See `ScoreStrategy`."""
        return score(self._forward, micro_batches, temperature, self._rank)

    @torch.no_grad()
    def states(self, micro_batches: Sequence[Sequences]) -> list[Floats]:
        return states(self._forward, micro_batches, self._rank)

    def offload(self) -> None:
        """See `ScoreStrategy`."""
        self._offload.offload(tensors_in([*self._policy.parameters(), *self._policy.buffers()]))

    def onload(self) -> None:
        """See `ScoreStrategy`."""
        with readable_memory_errors(self._rank, "returning to the device"):
            self._offload.onload()
