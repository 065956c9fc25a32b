"""What one step of a benchmark does: model, tokens, precision and places. The step and its floors are given the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

GIB = 1 << 30
BLOCK = 16
"""Tokens by which the KV cache of a sequence grows."""


@dataclass(frozen=True)
class TrainingWork:
    """What every training has."""

    model: str
    """Folder of the model, with its rows."""
    shape: dict[str, Any]
    """The model's config as `models.SHAPES` has it."""
    dtype: str
    """`bf16` or `fp32`."""
    devices: tuple[int, ...]
    """GPUs that train and score; none on the CPU."""
    train_ranks: int
    token_budget: int
    """Tokens of one packed row: of a micro-batch."""
    lora_rank: int
    """0 trains all parameters."""
    stage: int
    """Of ZeRO."""
    repetitions: int
    """Measured repetitions of a floor, after one to warm up."""
    scratch: str
    """Folder for what the run and the floors write."""

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Self:
        """What `write` wrote."""
        values: dict[str, Any] = json.loads(file.read_text())
        for key in values.keys() & {"devices", "infer_devices"}:
            values[key] = tuple(values[key])
        return cls(**values)


@dataclass(frozen=True)
class SftWork(TrainingWork):
    """One step of supervised fine-tuning, whose rows are those of the run in `scratch`/run."""

    checkpointed: int
    """Decoder layers that the run recomputed in the backward pass."""


@dataclass(frozen=True)
class Work(TrainingWork):
    """One step of RLVR. A sequence is a prompt with one sample."""

    infer_devices: tuple[int, ...]
    """GPUs that generate, one engine each; none on the CPU."""
    score_ranks: int
    prompts: int
    samples: int
    """Responses to each prompt."""
    prompt_tokens: int
    response_tokens: int
    sync: str
    """`adapter` or `merged`: what the engines take of a LoRA policy."""
    behaviour: str
    """`engine` or `trainer`: who computes the behaviour policy's log-probs."""
    max_num_seqs: int
    """Sequences that an engine runs at once."""

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Tokens of a step, prompts counted with every sample."""
        return self.sequences * self.length

    @property
    def engines(self) -> int:
        return max(1, len(self.infer_devices))

    @property
    def adapter(self) -> bool:
        """Whether the engines generate with a LoRA adapter."""
        return self.lora_rank > 0 and self.sync == "adapter"

    @property
    def kv_cache_bytes(self) -> int:
        """Room for all sequences of one engine at once, and a tenth more."""
        return self._kv_cache_of(1.1 * self.sequences / self.engines * (self.length + BLOCK))

    def _kv_cache_of(self, tokens: float) -> int:
        """Bytes that keep the keys and values of so many tokens, and a little more."""
        shape, width = self.shape, 4 if self.dtype == "fp32" else 2
        head = shape["hidden_size"] // shape["num_attention_heads"]
        return int(tokens * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * width) + GIB // 4


@dataclass(frozen=True)
class LongTailWork(Work):
    """One step of RLVR whose responses end with the same probability at each token: `response_tokens` is only their limit."""

    mean: int
    """Tokens of a response, on average, if there were no limit."""
    kv_cache_gib: float | None
    """Of each engine; None for as much as its sequences need on average."""

    @property
    def end_tokens(self) -> int:
        """Ids that end a response, so that a policy that gives all tokens the same probability has this mean."""
        return round(self.shape["vocab_size"] / self.mean)

    @property
    def end_probability(self) -> float:
        """At each token."""
        return self.end_tokens / self.shape["vocab_size"]

    @property
    def truncated_fraction(self) -> float:
        """Of responses that reach the limit without an end, as expected."""
        return (1.0 - self.end_probability) ** self.response_tokens

    @property
    def mean_length(self) -> float:
        """Tokens of a response with the limit, as expected: the sum over positions of the probability that it gets there."""
        return (1.0 - self.truncated_fraction) / self.end_probability

    @property
    def kv_cache_bytes(self) -> int:
        """Room for as many sequences as an engine runs, each of the average length, and a quarter more.

        A running response has had `mean` tokens so far on average, as its end is as likely at each. One sequence of the greatest
        length always fits.
        """
        if self.kv_cache_gib is not None:
            return int(self.kv_cache_gib * GIB)
        usual = 1.25 * self.max_num_seqs * (self.prompt_tokens + self.mean + BLOCK)
        return self._kv_cache_of(max(usual, self.length + BLOCK))


TEMPLATE_TOKENS = 32
"""That a chat template writes about a message and the turn that follows it, at most."""


@dataclass(frozen=True)
class AgentWork(LongTailWork):
    """One step of RLVR on episodes: `mean` and `response_tokens` are of a turn."""

    turns: int
    answer_tokens: int
    """Of what the environment says between two turns."""

    @property
    def length(self) -> int:
        """Tokens that an episode may have: its turns twice the mean length on average. One in a hundred of eight turns is longer."""
        return self.prompt_tokens + TEMPLATE_TOKENS + self.turns * (2 * self.mean + self.answer_tokens + TEMPLATE_TOKENS)

    @property
    def kv_cache_bytes(self) -> int:
        """Room for every episode at its greatest length."""
        return self._kv_cache_of(self.sequences / self.engines * (self.length + BLOCK))


def parameters(shape: dict[str, Any]) -> int:
    """All parameters of a Qwen2 of this shape, tied ones counted once."""
    hidden, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    narrow = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * narrow + hidden + 2 * narrow
    layer = attention + 3 * hidden * inner + 2 * hidden
    heads = 1 if shape["tie_word_embeddings"] else 2
    return shape["num_hidden_layers"] * layer + heads * vocabulary * hidden + hidden


def adapter_parameters(shape: dict[str, Any], rank: int) -> int:
    """Parameters of a LoRA adapter on every linear layer."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    narrow = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sides = 2 * (hidden + hidden) + 2 * (hidden + narrow) + 3 * (hidden + inner)
    return shape["num_hidden_layers"] * rank * sides
