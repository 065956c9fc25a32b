"""The work of a benchmark's step: model, tokens, precision and devices. The step and its floors get the same work."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

GIB = 1 << 30
BLOCK = 16
"""Number of tokens of a KV-cache block."""


@dataclass(frozen=True)
class TrainingWork:
    """Common settings of all trainings."""

    model: str
    """Folder of the model, with its rows."""
    shape: dict[str, Any]
    """The model's config in `models.SHAPES`."""
    dtype: str
    """`bf16` or `fp32`."""
    devices: tuple[int, ...]
    """GPUs that train and score, none on the CPU."""
    train_ranks: int
    token_budget: int
    """Number of tokens of one packed row, a micro-batch."""
    lora_rank: int
    """0 trains all parameters."""
    stage: int
    """Stage of ZeRO."""
    repetitions: int
    """Number of measured repetitions of a floor, after one warm-up."""
    scratch: str
    """Folder for files of the run and the floors."""

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file of `write`."""
        values: dict[str, Any] = json.loads(file.read_text())
        for key in values.keys() & {"devices", "infer_devices"}:
            values[key] = tuple(values[key])
        return cls(**values)


@dataclass(frozen=True)
class SftWork(TrainingWork):
    """One step of supervised fine-tuning, whose rows are those of the run in `scratch`/run."""

    checkpointed: int
    """Number of decoder layers that the run recomputed in the backward pass."""


@dataclass(frozen=True)
class Work(TrainingWork):
    """One step of RLVR. A sequence is a prompt with one sample."""

    infer_devices: tuple[int, ...]
    """GPUs that generate, one engine each, none on the CPU."""
    score_ranks: int
    prompts: int
    samples: int
    """Number of responses to each prompt."""
    prompt_tokens: int
    response_tokens: int
    sync: str
    """`adapter` or `merged`: the form in which engines load a LoRA policy."""
    behaviour: str
    """`engine` or `trainer`: the source of the behaviour policy's log-probs."""
    max_num_seqs: int
    """Number of concurrent sequences of an engine."""

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a step. Prompts count with every sample."""
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
        """Return the bytes for all sequences of one engine at once, and a tenth more."""
        return self._kv_cache_of(1.1 * self.sequences / self.engines * (self.length + BLOCK))

    def _kv_cache_of(self, tokens: float) -> int:
        """Return the bytes for keys and values of so many tokens, and a little more."""
        shape, width = self.shape, 4 if self.dtype == "fp32" else 2
        head = shape["hidden_size"] // shape["num_attention_heads"]
        return int(tokens * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * width) + GIB // 4


@dataclass(frozen=True)
class LongTailWork(Work):
    """One step of RLVR whose responses end with the same probability at each token: `response_tokens` is only their limit."""

    mean: int
    """Mean number of tokens of a response without a limit."""
    kv_cache_gib: float | None
    """KV-cache bytes of each engine, None for the mean need of its sequences."""

    @property
    def end_tokens(self) -> int:
        """Return the number of ids that end a response, with which a uniform policy has this mean."""
        return round(self.shape["vocab_size"] / self.mean)

    @property
    def end_probability(self) -> float:
        """Return the probability of an end at each token."""
        return self.end_tokens / self.shape["vocab_size"]

    @property
    def truncated_fraction(self) -> float:
        """Return the expected share of responses that reach the limit without an end."""
        return (1.0 - self.end_probability) ** self.response_tokens

    @property
    def mean_length(self) -> float:
        """Return the expected number of tokens of a response with the limit: the sum of the probabilities of reaching each position."""
        return (1.0 - self.truncated_fraction) / self.end_probability

    @property
    def kv_cache_bytes(self) -> int:
        """Return the bytes for an engine's concurrent sequences of the average length, and a quarter more.

        A running response has had `mean` tokens so far on average, as its end is as likely at each. One sequence of the greatest
        length always fits.
        """
        if self.kv_cache_gib is not None:
            return int(self.kv_cache_gib * GIB)
        usual = 1.25 * self.max_num_seqs * (self.prompt_tokens + self.mean + BLOCK)
        return self._kv_cache_of(max(usual, self.length + BLOCK))


TEMPLATE_TOKENS = 32
"""Largest number of tokens of a chat template around a message and the next turn."""


@dataclass(frozen=True)
class AgentWork(LongTailWork):
    """One step of RLVR on episodes: `mean` and `response_tokens` are of a turn."""

    turns: int
    answer_tokens: int
    """Number of tokens of the environment's answer between two turns."""

    @property
    def length(self) -> int:
        """Return the limit of an episode's tokens: turns of twice the mean length on average. One in a hundred of eight turns is longer."""
        return self.prompt_tokens + TEMPLATE_TOKENS + self.turns * (2 * self.mean + self.answer_tokens + TEMPLATE_TOKENS)

    @property
    def kv_cache_bytes(self) -> int:
        """Return the bytes for every episode at its greatest length."""
        return self._kv_cache_of(self.sequences / self.engines * (self.length + BLOCK))


def parameters(shape: dict[str, Any]) -> int:
    """Return the number of parameters of a Qwen2 of this shape. Tied ones count once."""
    hidden, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    narrow = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * narrow + hidden + 2 * narrow
    layer = attention + 3 * hidden * inner + 2 * hidden
    heads = 1 if shape["tie_word_embeddings"] else 2
    return shape["num_hidden_layers"] * layer + heads * vocabulary * hidden + hidden


def adapter_parameters(shape: dict[str, Any], rank: int) -> int:
    """Return the number of parameters of a LoRA adapter on every linear layer."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    narrow = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sides = 2 * (hidden + hidden) + 2 * (hidden + narrow) + 3 * (hidden + inner)
    return shape["num_hidden_layers"] * rank * sides
