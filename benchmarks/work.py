"""The work of a benchmark's step: model, tokens, precision and devices. The step and its floors share the same work."""

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
    """Settings that RLVR and fine-tuning have in common."""

    model: str
    """Folder with the model and its rows."""
    shape: dict[str, Any]
    """The model's config in `models.SHAPES`."""
    dtype: str
    """`bf16` or `fp32`."""
    devices: tuple[int, ...]
    """GPUs that train and score. Empty on the CPU."""
    train_ranks: int
    token_budget: int
    """Largest number of tokens in a packed row, which is a micro-batch."""
    lora_rank: int
    """0 trains all parameters."""
    stage: int
    """Stage of ZeRO."""
    repetitions: int
    """Number of measured repetitions of a floor, after one warm-up."""
    scratch: str
    """Folder for files of the run and the floors."""

    def write(self, file: Path) -> None:
        """Write the fields as JSON."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file that `write` has written."""
        values: dict[str, Any] = json.loads(file.read_text())
        for key in values.keys() & {"devices", "infer_devices"}:
            values[key] = tuple(values[key])
        return cls(**values)


@dataclass(frozen=True)
class SftWork(TrainingWork):
    """One step of supervised fine-tuning, with the rows of the run in `scratch`/run."""

    checkpointed: int
    """Number of decoder layers that the run recomputed in the backward pass."""


@dataclass(frozen=True)
class Work(TrainingWork):
    """One step of RLVR. A sequence is a prompt and one sample."""

    infer_devices: tuple[int, ...]
    """GPUs that generate, one engine on each. Empty on the CPU."""
    score_ranks: int
    prompts: int
    samples: int
    """Number of responses per prompt."""
    prompt_tokens: int
    response_tokens: int
    sync: str
    """`adapter` or `merged`: the form in which engines load a LoRA policy."""
    behaviour: str
    """`engine` or `trainer`: the source of the behaviour policy's log-probs."""
    max_num_seqs: int
    """Largest number of concurrent sequences of an engine."""

    @property
    def length(self) -> int:
        """Return the number of tokens of a sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a step. A prompt counts once for each of its samples."""
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
        """Return the KV-cache bytes for all sequences of one engine at once, plus a tenth."""
        return self._kv_cache_of(1.1 * self.sequences / self.engines * (self.length + BLOCK))

    def _kv_cache_of(self, tokens: float) -> int:
        """Return the bytes for the keys and values of `tokens` tokens, plus 0.25 GiB."""
        shape, width = self.shape, 4 if self.dtype == "fp32" else 2
        head = shape["hidden_size"] // shape["num_attention_heads"]
        return int(tokens * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * width) + GIB // 4


@dataclass(frozen=True)
class LongTailWork(Work):
    """One step of RLVR with responses that end with the same probability at each token. `response_tokens` is their
    limit.
    """

    mean: int
    """Mean number of tokens per response if there were no limit."""
    kv_cache_gib: float | None
    """KV cache of each engine in GiB. None computes it from the mean length of its sequences."""

    @property
    def end_tokens(self) -> int:
        """Return the number of end-token ids with which responses of a uniform policy have `mean` tokens on average."""
        return round(self.shape["vocab_size"] / self.mean)

    @property
    def end_probability(self) -> float:
        """Return the probability that a response ends at any given token."""
        return self.end_tokens / self.shape["vocab_size"]

    @property
    def truncated_fraction(self) -> float:
        """Return the expected share of responses that reach the limit without an end token."""
        return (1.0 - self.end_probability) ** self.response_tokens

    @property
    def mean_length(self) -> float:
        """Return the expected number of tokens per response with the limit: the sum of the probabilities of reaching
        each position.
        """
        return (1.0 - self.truncated_fraction) / self.end_probability

    @property
    def kv_cache_bytes(self) -> int:
        """Return the KV-cache bytes for an engine's concurrent sequences of mean length, plus a quarter.

        A running response already has `mean` tokens on average, because its end is equally likely at each token. There
        is always room for one sequence of the largest length.
        """
        if self.kv_cache_gib is not None:
            return int(self.kv_cache_gib * GIB)
        usual = 1.25 * self.max_num_seqs * (self.prompt_tokens + self.mean + BLOCK)
        return self._kv_cache_of(max(usual, self.length + BLOCK))


TEMPLATE_TOKENS = 32
"""Largest number of tokens that a chat template adds around a message and the next turn."""


@dataclass(frozen=True)
class AgentWork(LongTailWork):
    """One step of RLVR on episodes. `mean` and `response_tokens` apply to each turn."""

    turns: int
    answer_tokens: int
    """Number of tokens of the environment's answer between two turns."""

    @property
    def length(self) -> int:
        """Return the token limit of an episode: turns of twice the mean length. About 1% of episodes with eight turns
        are longer.
        """
        return (
            self.prompt_tokens + TEMPLATE_TOKENS + self.turns * (2 * self.mean + self.answer_tokens + TEMPLATE_TOKENS)
        )

    @property
    def kv_cache_bytes(self) -> int:
        """Return the KV-cache bytes for all episodes of an engine at their largest length."""
        return self._kv_cache_of(self.sequences / self.engines * (self.length + BLOCK))


def parameters(shape: dict[str, Any]) -> int:
    """Return the number of parameters of a Qwen2 model of this shape. Tied parameters count once."""
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
