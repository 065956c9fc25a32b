"""The records that pass between modules: frozen and typed. The docstring of a field gives its shape and unit.

P is a prompt's length in tokens, R a response's, E a number of episodes, N of sequences, one for each of the episodes' trajectories,
and T the sum of the sequences' lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Metrics = dict[str, float]
FP32_MAX = 3.4028234663852886e38
"""Largest number in a loss. Losses are computed in fp32, where a larger number would be infinite."""


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """The model ended it, by an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """It reached `response_length` and is truncated."""
    ABORT = "abort"
    """The engine aborted it; the tokens are a prefix."""


class RewardOutcome(StrEnum):
    """How the computation of a reward ended. Only SCORED carries a verdict on the response."""

    SCORED = "scored"
    UNPARSABLE = "unparsable"
    """No answer could be read from the response, or from the reference answer."""
    CRASHED = "crashed"
    """The reward function raised, or its process died."""
    TIMED_OUT = "timed_out"
    """The computation exceeded its deadline and was ended."""
    UNAVAILABLE = "unavailable"
    """No verdict was possible: a sandbox or judge that the reward needs was unavailable."""


NO_VERDICT = frozenset({RewardOutcome.CRASHED, RewardOutcome.TIMED_OUT, RewardOutcome.UNAVAILABLE})
"""Outcomes without a verdict: such responses are not trained on."""


@dataclass(frozen=True)
class TurnReward:
    """The reward of one turn, or step, of a response."""

    end: int
    """Characters of the response's text up to the end of the turn."""
    value: float


@dataclass(frozen=True)
class RewardResult:
    """Result of a reward function for one response."""

    value: float
    """The reward. For an outcome other than SCORED it is the configured stand-in (0 unless told)."""
    outcome: RewardOutcome = RewardOutcome.SCORED
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components, for the metrics and the samples file."""
    note: str = ""
    """A short explanation: the exception of a crash, the answer that was read."""
    turns: tuple[TurnReward, ...] = ()
    """Turns of the response in their order, for `step_reinforce`. What `value` has beyond their sum is earned at the response's end."""


@dataclass(frozen=True)
class Prompt:
    """One question to the policy, rendered and tokenised."""

    prompt_id: int
    """Position in the order in which the sampler drew prompts, counted from 0 over the whole run."""
    token_ids: Ints
    """[P]"""
    text: str
    """The rendered prompt: what the chat template made of the messages."""
    domain: str
    """Key of `rewards` that scores the responses."""
    row: Mapping[str, Any]
    """The data set's row, for reward functions."""


@dataclass(frozen=True)
class Completion:
    """One sampled response as an engine returns it."""

    token_ids: Ints
    """[R], the end-of-sequence token included if the model produced it."""
    log_probs: Floats | None
    """[R], natural log, of the sampled tokens under the distribution they were sampled from. None if not asked for."""
    policy_versions: Ints
    """[R], number of optimizer updates behind the weights that produced each token."""
    finish_reason: FinishReason
    text: str


NumberedCompletions = Sequence[tuple[int, Completion]]
"""Responses to one prompt that ended at about the same time, each with the number of its sample."""


class StopReason(StrEnum):
    """Why a trajectory ended."""

    COMPLETED = "completed"
    """The policy, or its environment, ended it."""
    LENGTH = "length"
    """A response reached `response_length` and is truncated."""
    MAX_TURNS = "max_turns"
    """The policy has used all of its turns."""
    CONTEXT_FULL = "context_full"
    """The context has no room for another turn."""
    DEADLINE = "deadline"
    """It exceeded its deadline."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The environment raised or its process died."""
    ABORTED = "aborted"
    """The engine aborted a response; its tokens are a prefix."""


@dataclass(frozen=True)
class VersionRun:
    """Consecutive tokens that one version of the policy sampled."""

    version: int
    """Number of optimizer updates behind the weights."""
    tokens: int


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one party: sampled by the policy, or given to it. L is their number, which may be 0."""

    token_ids: Ints
    """[L]"""
    sampled: bool
    """Whether the policy sampled these tokens. Only sampled tokens enter a loss."""
    log_probs: Floats | None
    """[L], natural log, of sampled tokens under the distribution they were sampled from. None if not asked for, or if given."""
    versions: Sequence[VersionRun]
    """Versions of sampled tokens, in their order; they sum to L. Empty if the tokens are given."""
    text: str
    """Text that the environment and the reward see."""
    calls: Sequence[Mapping[str, Any]] = ()
    """Tools that the policy calls in it, each with `name` and `arguments`, a JSON text."""


@dataclass(frozen=True)
class Trajectory:
    """One path from the first observation to the last action. It begins with a given segment of at least one token."""

    segments: Sequence[Segment]
    stop: StopReason

    @property
    def sampled(self) -> list[Segment]:
        """The policy's segments, in their order."""
        return [segment for segment in self.segments if segment.sampled]


@dataclass(frozen=True)
class Episode:
    """One attempt at a prompt, with everything training needs to know of it. A single turn is a prompt and a response."""

    trajectories: Sequence[Trajectory]
    """One, or more where a context was compacted or forked. What a later one shares with an earlier one is given in it, not sampled,
    so that no token is learnt twice. At least one segment is sampled, if of no token."""
    reward: RewardResult
    turn_rewards: Sequence[float] = ()
    """The reward of each sampled segment, in order. What `reward.value` has beyond their sum is earned at the end. Empty if nothing
    is known of the segments."""
    turn_states: Sequence[str] = ()
    """The state of the environment before each sampled segment, in their order: equal texts are equal states. Empty without an
    environment."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode from the environment and the loop over its turns."""

    @property
    def sampled(self) -> list[Segment]:
        """The policy's segments of all trajectories, in their order."""
        return [segment for trajectory in self.trajectories for segment in trajectory.segments if segment.sampled]

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return sum(len(segment.token_ids) for segment in self.sampled)

    @property
    def stop(self) -> StopReason:
        """Why the last trajectory ended."""
        return self.trajectories[-1].stop


@dataclass(frozen=True)
class RolloutGroup:
    """One prompt and all attempts at it, finished and scored."""

    prompt: Prompt
    episodes: Sequence[Episode]
    baseline: Episode | None = None
    """The greedy response, which is compared with and not trained on; None if the estimator does not use it."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Neutral defaults sample from the model's own distribution."""

    max_new_tokens: int
    samples: int = 1
    """Responses for each prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the model's own end-of-sequence token; they belong to it."""
    ignore_eos: bool = False
    """Generate exactly `max_new_tokens`; for benchmarks."""
    log_probs: bool = True
    """Whether to return the sampled tokens' log-probs. Generation without them is faster."""


@dataclass(eq=False)
class Session:
    """Marks the requests of one episode. The engine that has answered one of them holds what the next one begins with."""


@dataclass(frozen=True)
class Sequences:
    """N token sequences, concatenated without padding."""

    token_ids: Ints
    """[T]"""
    offsets: NDArray[np.int64]
    """[N + 1]; sequence i is `token_ids[offsets[i]:offsets[i + 1]]`."""
    response_mask: Bools
    """[T]; True for tokens that enter a loss: those that the policy sampled, or that an example teaches."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sequence, [N]."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sequence that enter a loss, [N]."""
        counts, there = np.zeros(len(self), np.int64), self.lengths > 0
        if there.any():
            # An empty sequence has no place in `reduceat`. As bytes, booleans are added up several times faster.
            counts[there] = np.add.reduceat(self.response_mask.view(np.int8), self.offsets[:-1][there], dtype=np.int32)
        return counts

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class TrainBatch:
    """The data of one call of `train_step`. Per-token fields hold 0 outside `response_mask`.

    Position t of a per-token field speaks of token t given the tokens before it.
    """

    sequences: Sequences
    advantages: Floats
    """[T]"""
    behaviour_log_probs: Floats | None
    """[T], natural log, of the engine and version that sampled the token. None if not requested."""
    policy_versions: Ints
    """[T], the version that sampled the token."""
    ref_log_probs: Floats | None = None
    """[T], natural log, of the reference policy. None if no term of the loss uses it."""
    proximal_log_probs: Floats | None = None
    """[T], natural log, of the trainer's policy before the step's first update. None if that pass was not run."""
    token_selection: Bools | None = None
    """[T], tokens that the loss treats differently. None if it treats all alike."""
    sequence_weights: Floats | None = None
    """[N], weights of the sequences' losses. None means equal weights."""
    episode_of_sequence: Ints | None = None
    """[N], not decreasing: the episode of each sequence. Means over sequences count an episode once. None: one episode each."""
    labels: Floats | None = None
    """[N], label of each sequence: 1 for desirable and 0 for not, or the margin of its pair. None without labels."""
    teacher_states: Floats | None = None
    """[S, H] for the S response tokens: the last hidden states from which a teacher predicts them. None without a teacher."""
    sequences_per_example: int = 1
    """Sequences that a loss compares and that stay together in one micro-batch: 2 for pairs, the chosen one first."""
    values: Floats | None = None
    """[T], the critic's value before the token, before the step's first update. None without a critic."""
    returns: Floats | None = None
    """[T], the critic's target. None without a critic."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def example_count(self) -> int:
        """Number of examples. Splits never divide an example."""
        return len(self) // self.sequences_per_example


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model, by its name in the checkpoint."""

    name: str
    dtype: str
    """Name as torch prints it: `torch.bfloat16`."""
    shape: tuple[int, ...]
    nbytes: int
