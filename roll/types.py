"""Typed, frozen records that modules exchange. The docstring of a field states its shape and unit.

In shapes, P is the length of a prompt in tokens, R the length of a response, E the number of episodes, N the number of
sequences (one for each trajectory of the episodes), and T the sum of the lengths of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Routes = NDArray[np.int16]
"""[tokens, layers, k], the k experts that the engine chose for each token in each layer; -1 where it is not known."""
Metrics = dict[str, float]
FP32_MAX = 3.4028234663852886e38
"""Largest finite fp32 number. Losses are computed in fp32, where a larger number would be infinite."""


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """The model ended the response, with an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The response reached the length limit and is truncated."""
    ABORT = "abort"
    """The engine aborted the response; its tokens are only a prefix."""


class RewardOutcome(StrEnum):
    """How the computation of a reward ended."""

    SCORED = "scored"
    """The reward function scored the response."""
    UNPARSABLE = "unparsable"
    """No answer was found in the response, or in the reference answer."""
    CRASHED = "crashed"
    """The reward function raised an exception, or its process died."""
    TIMED_OUT = "timed_out"
    """The reward function exceeded its timeout and was stopped."""
    UNAVAILABLE = "unavailable"
    """A sandbox or judge that the reward needs was unavailable."""


NO_VERDICT = frozenset({RewardOutcome.CRASHED, RewardOutcome.TIMED_OUT, RewardOutcome.UNAVAILABLE})
"""Outcomes without a verdict on the response. A response with one of them is not trained on."""


@dataclass(frozen=True)
class TurnReward:
    """The reward of one turn of a response."""

    end: int
    """Position of the end of the turn in the response text, in characters."""
    value: float


@dataclass(frozen=True)
class RewardResult:
    """The result of a reward function for one response."""

    value: float
    """The reward. For an outcome other than SCORED, it is the configured `failed_value` (0 by default)."""
    outcome: RewardOutcome = RewardOutcome.SCORED
    parts: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward by name, for the metrics and the samples file."""
    note: str = ""
    """A short explanation, such as the exception of a crash or the answer that was found."""
    turns: tuple[TurnReward, ...] = ()
    """Rewards of the turns in order, for `step_reinforce`. The last one gets what `value` has beyond their sum."""
    score: float | None = None
    """The verdict without penalties, for difficulty and the filters of prompts. None: `value` is the verdict."""
    trace: str = ""
    """The end of the traceback of an exception, with the frames of the user's code alone. Empty without an exception.
    """
    failures: Mapping[str, RewardResult] = field(default_factory=dict)
    """The results of the parts of a reward that gave no verdict, by the name of the part. Empty without parts."""

    @property
    def graded(self) -> float:
        """Return `score`, or `value` if there is no separate score."""
        return self.value if self.score is None else self.score


@dataclass(frozen=True)
class Pictures:
    """The K pictures of N token sequences, in the order in which the sequences show them."""

    values: Floats
    """[R, D], what the model's vision tower reads: one row for each patch of a picture (Qwen), for each of its tiles
    (SmolVLM), or for the picture (Gemma 3). The rows of a picture are adjacent.
    """
    rows: NDArray[np.int64]
    """[K], number of rows in `values` of each picture."""
    grids: NDArray[np.int64]
    """[K, 2], height and width of each picture in placeholder tokens, for models whose positions follow the grid; 0 for
    others.
    """
    starts: NDArray[np.int64]
    """[K], index of each picture's first placeholder token in its own sequence."""
    counts: NDArray[np.int64]
    """[N], number of pictures of each sequence."""
    shared: NDArray[np.int64] | None = None
    """[K], index in `values` of each picture's first row, if sequences share rows: responses to one prompt show the
    same pictures. None: the rows of each picture follow those of the one before.
    """

    @property
    def begins(self) -> NDArray[np.int64]:
        """Return the index in `values` of each picture's first row, [K]."""
        return np.cumsum(self.rows) - self.rows if self.shared is None else self.shared

    def distinct(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first of each D pictures with rows of their own, [D], in the order of their rows, and for each
        picture which of these it is, [K].
        """
        _, firsts, which = np.unique(self.begins, return_index=True, return_inverse=True)
        return firsts, which


@dataclass(frozen=True)
class AskedPictures:
    """The pictures of a prompt as an engine gets them, once for all responses to the prompt."""

    token_ids: Ints
    """[U], the tokens of the prompt with a single placeholder for each picture."""
    files: tuple[bytes, ...]
    """The bytes of each picture's file, in the order of the placeholders."""
    names: tuple[str, ...]
    """The XXH3 hash of each file, in hexadecimal digits."""


@dataclass(frozen=True)
class PromptPictures:
    """The pictures of a prompt. They are read only when they are needed, so that prompts that wait hold no pixels."""

    names: tuple[str, ...]
    """The path of each picture, or the hash of one that was given as bytes."""
    asked: Callable[[], AskedPictures]
    """Reads the files. Raises DataError if one has changed since the rows were prepared."""
    pixels: Callable[[], Pictures]
    """Reads the files, and returns what the vision tower sees. Raises DataError as `asked` does."""


@dataclass(frozen=True)
class Prompt:
    """One prompt for the policy, rendered and tokenised."""

    prompt_id: int
    """Number of the prompt in the order in which the sampler draws them, counted from 0 over the whole run."""
    token_ids: Ints
    """[P], token ids."""
    text: str
    """The prompt text after the chat template has been applied."""
    domain: str
    """Domain of the prompt: a key of `rewards` or `environments`."""
    row: Mapping[str, Any]
    """The row of the data set, for reward functions."""
    place: str = ""
    """File and number of the row, `file:row`. Empty if the prompt is from no file."""
    shown: PromptPictures | None = field(default=None, compare=False)
    """The pictures of the prompt, whose placeholders `token_ids` has as many of as the model needs. None without any.
    Rewards get a prompt without them.
    """


@dataclass(frozen=True)
class Completion:
    """One response, as an engine returns it."""

    token_ids: Ints
    """[R], token ids, including the end-of-sequence token if the model produced it."""
    log_probs: Floats | None
    """[R], natural log-probs of the tokens under the sampling distribution. None if not requested."""
    policy_versions: Ints
    """[R], version of the policy that sampled each token: the number of optimizer updates in its weights."""
    finish_reason: FinishReason
    text: str
    routes: Routes | None = None
    """[C + R, layers, k], routes of the request's context and of the response. None if not requested."""
    cached_tokens: int = 0
    """Number of the context's tokens that the engine had in its prefix cache. 0 if it does not say."""


NumberedCompletions = Sequence[tuple[int, Completion]]
"""Responses to one prompt that ended at about the same time, each with its sample number."""


class StopReason(StrEnum):
    """Why a trajectory ended."""

    COMPLETED = "completed"
    """The policy or its environment ended the trajectory."""
    LENGTH = "length"
    """A response reached the length limit and is truncated."""
    MAX_TURNS = "max_turns"
    """The policy has used all of its turns."""
    CONTEXT_FULL = "context_full"
    """The context has no room for another turn."""
    DEADLINE = "deadline"
    """The episode exceeded its timeout."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The environment raised an exception, or its process died."""
    ABORTED = "aborted"
    """The engine aborted a response; its tokens are only a prefix."""


@dataclass(frozen=True)
class VersionRun:
    """A run of consecutive tokens that one version of the policy sampled."""

    version: int
    """Number of optimizer updates in the weights."""
    tokens: int
    """Number of tokens."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens, all sampled by the policy or all given to it. L is their number, maybe 0."""

    token_ids: Ints
    """[L], token ids."""
    sampled: bool
    """Whether the policy sampled these tokens. Only sampled tokens enter a loss."""
    log_probs: Floats | None
    """[L], natural log-probs of the tokens under the sampling distribution. None if not requested, or for given tokens.
    """
    versions: Sequence[VersionRun]
    """Versions of the policy that sampled the tokens, in order; L tokens in total. Empty for given tokens."""
    text: str
    """Text of the tokens, for the environment and the reward."""
    calls: Sequence[Mapping[str, Any]] = ()
    """Tool calls of the policy in this segment, each with a `name` and `arguments` as JSON text."""
    routes: Routes | None = None
    """[L, layers, k], routes of the tokens in a mixture of experts. None if none are known."""
    pictures: Sequence[str] = ()
    """Names of the pictures that the tokens show, in order."""


@dataclass(frozen=True)
class Trajectory:
    """One path from the first observation to the last action. Its first segment is given and not empty."""

    segments: Sequence[Segment]
    stop: StopReason
    shown: PromptPictures | None = field(default=None, compare=False)
    """The pictures that its environment showed, in order of appearance. None without any. Those of the prompt of a
    single turn are in `Prompt.shown`.
    """

    @property
    def sampled(self) -> list[Segment]:
        """Return the segments that the policy sampled, in order."""
        return [segment for segment in self.segments if segment.sampled]


@dataclass(frozen=True)
class PartnerTurn:
    """A turn of another policy in an episode. No loss has its tokens; the environment may show the policy its text."""

    after: int
    """Number of the policy's turns before it."""
    partner: str
    """Name of the other policy in its domain."""
    text: str


@dataclass(frozen=True)
class Episode:
    """One attempt at a prompt, with all that training needs. One of a single turn is a prompt and a response."""

    trajectories: Sequence[Trajectory]
    """One trajectory, or several if the context was compacted or forked. Sampled tokens that several trajectories share
    count as sampled in the first of these and as given in the others, so that no token is trained on twice. At least
    one segment is sampled, but it may be empty.
    """
    reward: RewardResult
    turn_rewards: Sequence[float] = ()
    """The reward of each sampled segment, in order. If `reward.value` differs from their sum, the last segment gets the
    difference. Empty if the rewards of segments are not known.
    """
    turn_states: Sequence[str] = ()
    """The environment's state before each sampled segment, in order: texts, equal for equal states, if there is one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode, from its environment and from the loop over its turns."""
    partner_turns: Sequence[PartnerTurn] = ()
    """Turns of the partners that the environment asked, in order."""

    @property
    def sampled(self) -> list[Segment]:
        """Return the sampled segments of all trajectories, in order."""
        return [segment for trajectory in self.trajectories for segment in trajectory.segments if segment.sampled]

    @property
    def text(self) -> str:
        """Return the text of the policy's turns, each on lines of its own, lest two numbers become one."""
        return "\n".join(segment.text for segment in self.sampled)

    @property
    def length(self) -> int:
        """Return the number of sampled tokens."""
        return sum(len(segment.token_ids) for segment in self.sampled)

    @property
    def stop(self) -> StopReason:
        """Return why the last trajectory ended."""
        return self.trajectories[-1].stop


@dataclass(frozen=True)
class RolloutGroup:
    """One prompt with all attempts at it, finished and scored."""

    prompt: Prompt
    episodes: Sequence[Episode]
    baseline: Episode | None = None
    """The greedy response, which serves as a baseline and is not trained on. None if the estimator does not need it."""
    began: float | None = field(default=None, compare=False)
    """When its sampling began, in Unix seconds. None for a group from a checkpoint."""
    ended: float | None = field(default=None, compare=False)
    """When all of its attempts were scored, in Unix seconds."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. The defaults sample from the unmodified distribution of the model."""

    max_new_tokens: int
    samples: int = 1
    """Number of responses per prompt."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, in addition to the end-of-sequence token of the model. The response includes them."""
    placeholder: int | None = None
    """The token that stands for a picture in a prompt. It ends a response as `stop_token_ids` do, and is then cut off
    it, because no picture belongs to it there. None for models that see no pictures.
    """
    end_texts: tuple[str, ...] = ()
    """Ends of a turn that are no single token. They end a response like `stop`. `Completion.text` leaves them out."""
    ignore_eos: bool = False
    """Whether to generate exactly `max_new_tokens` tokens, for benchmarks."""
    log_probs: bool = True
    """Whether to return the log-probs of the sampled tokens. Generation is faster without them."""

    @property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Return `stop_token_ids` and the placeholder."""
        return self.stop_token_ids if self.placeholder is None else (*self.stop_token_ids, self.placeholder)

    def without_stop_token(self, token_ids: list[int]) -> list[int]:
        """Return a response's tokens without that of `ending_token_ids` that ended it, special or not."""
        return token_ids[:-1] if token_ids and token_ids[-1] in self.ending_token_ids else token_ids

    def without_end_text(self, text: str) -> str:
        """Return a response's text without the text of `end_texts` that ended it."""
        return min((text.partition(end)[0] for end in self.end_texts), key=len, default=text)


@dataclass(eq=False)
class Session:
    """Identifies an episode's requests. The engine of the last one has the next one's prefix in its cache."""


@dataclass(frozen=True)
class Sequences:
    """N token sequences, concatenated without padding."""

    token_ids: Ints
    """[T], token ids."""
    offsets: NDArray[np.int64]
    """[N + 1]; sequence i is `token_ids[offsets[i]:offsets[i + 1]]`."""
    response_mask: Bools
    """[T]; True for tokens in the loss: tokens that the policy sampled, or target tokens of a data set."""
    routes: Routes | None = None
    """[T, layers, k], the routes to replay. None replays none."""
    shown: Pictures | None = None
    """The pictures of the sequences. None if they show none."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sequence, [N]."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens in the loss for each sequence, [N]."""
        counts, there = np.zeros(len(self), np.int64), self.lengths > 0
        if there.any():
            # `reduceat` cannot handle empty sequences. Booleans are added up several times faster as bytes.
            counts[there] = np.add.reduceat(self.response_mask.view(np.int8), self.offsets[:-1][there], dtype=np.int32)
        return counts

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class TrainBatch:
    """The data of one call of `train_step`. Per-token fields are 0 outside `response_mask`.

    Position t of a per-token field describes token t given the tokens before it.
    """

    sequences: Sequences
    advantages: Floats
    """[T], advantages."""
    behaviour_log_probs: Floats | None
    """[T], natural log-probs that the engine reported for the sampled tokens. None if not requested."""
    policy_versions: Ints
    """[T], version of the policy that sampled the token."""
    ref_log_probs: Floats | None = None
    """[T], natural log-probs of the reference policy. None if no term of the loss uses them."""
    proximal_log_probs: Floats | None = None
    """[T], natural log-probs of the trainer's policy before the first update of the step. None if not computed."""
    token_selection: Bools | None = None
    """[T], True for tokens that the loss treats differently from the others. None if it treats all tokens equally."""
    sequence_weights: Floats | None = None
    """[N], weights of the sequences in the loss. None means equal weights."""
    episode_of_sequence: Ints | None = None
    """[N], each sequence's episode, ascending. Means over sequences count an episode once. None: one sequence each."""
    labels: Floats | None = None
    """[N], label of each sequence: 1 if desirable and 0 if undesirable, or the margin of its pair. None without labels.
    """
    teacher_states: Floats | None = None
    """[S, H], last hidden states with which the teacher predicts each of the S response tokens. None without a teacher.
    """
    sequences_per_example: int = 1
    """Number of consecutive sequences kept in one micro-batch: 2 for pairs (chosen, then rejected), else 1."""
    values: Floats | None = None
    """[T], the critic's values before each token, computed before the step's first update. None without a critic."""
    returns: Floats | None = None
    """[T], target values of the critic. None without a critic."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def example_count(self) -> int:
        """Return the number of examples. An example is never split over ranks or micro-batches."""
        return len(self) // self.sequences_per_example


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and size of one tensor of the model."""

    name: str
    """Name of the tensor in the checkpoint."""
    dtype: str
    """Name of the data type as torch prints it, for example `torch.bfloat16`."""
    shape: tuple[int, ...]
    nbytes: int
