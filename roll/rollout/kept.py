"""Keeps every rollout of a run: one Parquet file for each step, with a row group for each prompt and a row for each
episode, and reads them again.

    scheduler ──groups──▶ RolloutFiles.keep ──▶ rollouts/step_000001.parquet ──▶ KeptRollouts ──groups──▶ scheduler

A file is written aside and renamed, so that a step is there as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet
from pydantic import TypeAdapter

from roll.errors import RollError
from roll.rollout.filters import usable
from roll.rollout.record import Locate, by_turns, observed
from roll.system.own_folder import own_folder, remove_ownerless
from roll.types import (
    Episode,
    Floats,
    PartnerTurn,
    Prompt,
    RewardOutcome,
    RewardResult,
    RolloutGroup,
    Segment,
    StopReason,
    TrainBatch,
    Trajectory,
    TurnReward,
    VersionRun,
)

FOLDER = "rollouts"
"""Name of the folder in the run folder."""
NAME = re.compile(r"step_(\d{6,})\.parquet")
FACTS = b"roll"
"""Key of the `StepFacts` in a file."""
LONGEST_TEXT = 1 << 16
"""Largest number of characters of a reference answer or a note. A longer answer is left out, a longer note is cut."""

TEXTS, NUMBERS = pyarrow.list_(pyarrow.string()), pyarrow.map_(pyarrow.string(), pyarrow.float64())
SEGMENT = pyarrow.struct(
    {
        "sampled": pyarrow.bool_(),
        "token_ids": pyarrow.list_(pyarrow.int32()),
        "log_probs": pyarrow.list_(pyarrow.float32()),
        "versions": pyarrow.list_(pyarrow.struct({"version": pyarrow.int32(), "tokens": pyarrow.int32()})),
        "advantages": pyarrow.list_(pyarrow.float32()),
        "text": pyarrow.string(),
        "calls": TEXTS,
        "routes": pyarrow.struct({"shape": pyarrow.list_(pyarrow.int32()), "experts": pyarrow.list_(pyarrow.int16())}),
    }
)
TRAJECTORY = pyarrow.struct({"stop": pyarrow.string(), "in_loss": pyarrow.bool_(), "segments": pyarrow.list_(SEGMENT)})
SCHEMA = pyarrow.schema(
    {
        "step": pyarrow.int32(),
        "group": pyarrow.int32(),
        "prompt_id": pyarrow.int64(),
        "sample": pyarrow.int32(),
        "domain": pyarrow.string(),
        "place": pyarrow.string(),
        "ground_truth": pyarrow.string(),
        "reward": pyarrow.float64(),
        "score": pyarrow.float64(),
        "outcome": pyarrow.string(),
        "parts": NUMBERS,
        "note": pyarrow.string(),
        "turns": pyarrow.list_(pyarrow.struct({"end": pyarrow.int32(), "value": pyarrow.float64()})),
        "stop": pyarrow.string(),
        "length": pyarrow.int32(),
        "turn_rewards": pyarrow.list_(pyarrow.float64()),
        "turn_states": TEXTS,
        "metrics": NUMBERS,
        "partner_turns": pyarrow.list_(
            pyarrow.struct({"after": pyarrow.int32(), "partner": pyarrow.string(), "text": pyarrow.string()})
        ),
        "began": pyarrow.float64(),
        "ended": pyarrow.float64(),
        "trajectories": pyarrow.list_(TRAJECTORY),
    }
)
"""Columns of a file. docs/running.md explains them."""


@dataclass(frozen=True)
class Origin:
    """What holds for all rollouts of a run."""

    vocabulary: str
    """Digest of the tokenizer's vocabulary; see `roll.runs.role_models.vocabulary_digest`."""
    sampling: dict[str, float]
    """Values of the keys of `generating_args` that make the distribution of the behaviour policy."""
    rows: int
    """Number of prompts in the data, for the metric `epoch`."""
    identity: str
    """Fingerprint of the prompts and their order."""


@dataclass(frozen=True)
class StepFacts:
    """Metadata of a step's file, by which a replay is checked without reading any rollout."""

    step: int
    groups: int
    samples: int
    """Number of episodes of each group, without the greedy response."""
    domains: tuple[str, ...]
    longest: int
    """Number of tokens of the longest trajectory."""
    largest_token: int
    has_log_probs: bool
    has_baselines: bool
    has_routes: bool
    origin: Origin


_FACTS = TypeAdapter(StepFacts)


def step_facts(step: int, groups: Sequence[RolloutGroup], origin: Origin) -> StepFacts:
    """Return the facts of a step's groups."""
    episodes = [one for group in groups for one in (*group.episodes, *([group.baseline] if group.baseline else ()))]
    paths = [path for episode in episodes for path in episode.trajectories]
    segments = [segment for path in paths for segment in path.segments]
    sampled = [segment for segment in segments if segment.sampled and len(segment.token_ids)]
    return StepFacts(
        step,
        len(groups),
        min(len(group.episodes) for group in groups),
        tuple(sorted({group.prompt.domain for group in groups})),
        max(sum(len(segment.token_ids) for segment in path.segments) for path in paths),
        max(int(segment.token_ids.max(initial=0)) for segment in segments),
        all(segment.log_probs is not None for segment in sampled),
        all(group.baseline is not None for group in groups),
        any(segment.routes is not None for segment in segments),
        origin,
    )


def step_file(folder: Path, step: int) -> Path:
    """Return the path of a step's file, given the folder `rollouts`."""
    return folder / f"step_{step:06d}.parquet"


def steps_in(folder: Path) -> dict[int, Path]:
    """Return the files of a folder `rollouts` by step, in order. Empty if there is no such folder."""
    found = {int(match[1]): path for path in folder.glob("step_*") if (match := NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def continue_after(run_folder: Path, resumed_from: int | None) -> None:
    """Prepare the rollouts of an earlier start: the steps after `resumed_from` are taken again, so remove their files.

    With None a new run begins, and the folder becomes `rollouts.previous`.

    Raises:
        RollError: the folder cannot be changed.
    """
    folder, previous = run_folder / FOLDER, run_folder / f"{FOLDER}.previous"
    try:
        if resumed_from is not None or not steps_in(folder):
            for path in [path for step, path in steps_in(folder).items() if step > (resumed_from or 0)]:
                path.unlink()
            return
        for path in steps_in(previous).values():
            path.unlink()
        if previous.exists():
            previous.rmdir()
        folder.rename(previous)
    except OSError as error:
        raise RollError(f"{folder}: cannot be continued: {error}; fix or move the folder") from error


ReferenceOf = Callable[[Mapping[str, Any]], str | None]


class RolloutFiles:
    """Writes the rollouts of each step of a run."""

    def __init__(self, run_folder: Path, origin: Origin, reference: ReferenceOf) -> None:
        """`reference` returns the reference answer of a prompt's row as text."""
        self._run_folder, self._folder, self._origin = run_folder, run_folder / FOLDER, origin
        self._reference = reference

    async def keep(self, step: int, groups: Sequence[RolloutGroup], batch: TrainBatch | None) -> None:
        """Write the groups of a step, in a thread. `batch` is what is learnt from them; None without any verdict.

        Raises:
            RollError: the file cannot be written.
        """
        await asyncio.to_thread(self._write, step, groups, batch)

    def _write(self, step: int, groups: Sequence[RolloutGroup], batch: TrainBatch | None) -> None:
        file, parts = step_file(self._folder, step), _Trained(batch)
        facts = _FACTS.dump_json(step_facts(step, groups, self._origin))
        schema = SCHEMA.with_metadata({FACTS: facts})
        try:
            self._folder.mkdir(exist_ok=True)
            remove_ownerless(self._run_folder)
            with own_folder(self._run_folder) as site:  # which no mirror uploads
                partial = site / file.name
                with parquet.ParquetWriter(partial, schema, compression="zstd", write_page_checksum=True) as writer:
                    for number, group in enumerate(groups):
                        truth = self._reference(group.prompt.row)
                        rows = list(_rows(step, number, group, truth, parts))
                        writer.write_table(pyarrow.Table.from_pylist(rows, schema), row_group_size=len(rows))
                with partial.open("rb") as written:
                    os.fsync(written.fileno())
                os.replace(partial, file)
        except OSError as error:
            remedy = "free space or fix the folder, then start again: the run resumes from its last checkpoint"
            raise RollError(f"{file}: cannot be written: {error}; {remedy}") from error


class _Trained:
    """Hands out the batch's share of each trajectory of the episodes with a verdict, in order."""

    def __init__(self, batch: TrainBatch | None) -> None:
        self._batch, self._next = batch, 0

    def next(self) -> tuple[bool, Floats | None]:
        """Return whether a token of the next trajectory is in the loss, and the trajectory's advantages [T]."""
        if self._batch is None:
            return False, None
        begin, end = self._batch.sequences.offsets[self._next : self._next + 2]
        self._next += 1
        return bool(self._batch.sequences.response_mask[begin:end].any()), self._batch.advantages[begin:end]


def _rows(
    step: int, number: int, group: RolloutGroup, truth: str | None, trained: _Trained
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a group: its episodes in order, then its greedy response, whose `sample` is null."""
    prompt, learnt = group.prompt, usable(group)
    shared = {
        "step": step,
        "group": number,
        "prompt_id": prompt.prompt_id,
        "domain": prompt.domain,
        "place": _text(prompt.place),
        "ground_truth": _text(truth) if truth is not None and len(truth) <= LONGEST_TEXT else None,
        "began": group.began,
        "ended": group.ended,
    }
    for sample, episode in enumerate(group.episodes):
        is_learnt = any(episode is one for one in learnt)
        yield shared | {"sample": sample} | _episode_row(episode, trained if is_learnt else _Trained(None))
    if group.baseline is not None:
        yield shared | _episode_row(group.baseline, _Trained(None))


def _episode_row(episode: Episode, trained: _Trained) -> dict[str, Any]:
    reward = episode.reward
    return {
        "reward": reward.value,
        "score": reward.score,
        "outcome": reward.outcome.value,
        "parts": [(_text(name), value) for name, value in reward.parts.items()],
        "note": _text(reward.note[:LONGEST_TEXT]),
        "turns": [{"end": turn.end, "value": turn.value} for turn in reward.turns],
        "stop": episode.stop.value,
        "length": episode.length,
        "turn_rewards": list(episode.turn_rewards),
        "turn_states": list(map(_text, episode.turn_states)),
        "metrics": [(_text(name), value) for name, value in episode.metrics.items()],
        "partner_turns": [
            {"after": turn.after, "partner": turn.partner, "text": _text(turn.text)} for turn in episode.partner_turns
        ],
        "trajectories": [_trajectory_row(path, *trained.next()) for path in episode.trajectories],
    }


def _trajectory_row(path: Trajectory, in_loss: bool, advantages: Floats | None) -> dict[str, Any]:
    segments, begin = [], 0
    for segment in path.segments:
        end = begin + len(segment.token_ids)
        own = advantages[begin:end] if advantages is not None and segment.sampled else None
        segments.append(_segment_row(segment) | {"advantages": own})
        begin = end
    return {"stop": path.stop.value, "in_loss": in_loss, "segments": segments}


def _segment_row(segment: Segment) -> dict[str, Any]:
    routes = segment.routes
    return {
        "sampled": segment.sampled,
        "token_ids": segment.token_ids,
        "log_probs": segment.log_probs,
        "versions": [{"version": run.version, "tokens": run.tokens} for run in segment.versions],
        "text": _text(segment.text),
        "calls": [json.dumps(dict(call)) for call in segment.calls],
        "routes": None if routes is None else {"shape": routes.shape, "experts": routes.reshape(-1)},
    }


def _text(text: str) -> str:
    """Return a text that UTF-8 can encode: other characters become escapes, as in `samples.jsonl`."""
    return text.encode("utf-8", errors="backslashreplace").decode()


class KeptRollouts:
    """Implements `PromptSource` and `GroupSampler`: hands out the rollouts of a run again, step by step, in order.

    Its position is the number of groups that it has handed out.
    """

    def __init__(self, run_folder: Path, groups_per_step: int, locate: Locate | None = None) -> None:
        """`locate` finds the ends of turns in responses that were kept as one. With None, they stay one."""
        self._locate = locate
        self._folder, self._per_step, self._position = run_folder / FOLDER, groups_per_step, 0
        self._open: tuple[int, parquet.ParquetFile] | None = None
        self._drawn: dict[int, RolloutGroup] = {}  # by the id of the prompt

    def facts(self, step: int) -> StepFacts:
        """Return the facts of a step. Raises RollError if its file cannot be read."""
        with _readable(path := step_file(self._folder, step)):
            return _FACTS.validate_json((parquet.read_schema(path).metadata or {})[FACTS])

    def draw(self, count: int) -> list[Prompt]:
        """Return the prompts of the next `count` groups, which `sample` returns. Raises RollError if unreadable."""
        prompts = []
        for position in range(self._position, self._position + count):
            step, number = divmod(position, self._per_step)
            group = self._read(step + 1, number)
            self._drawn[group.prompt.prompt_id] = group
            prompts.append(group.prompt)
        self._position += count
        return prompts

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        """Return the group of a prompt that was drawn."""
        return self._drawn.pop(prompt.prompt_id)

    def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
        """See `GroupSampler`."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON-serialisable values."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position."""
        self._position = state["position"]

    def _read(self, step: int, number: int) -> RolloutGroup:
        path = step_file(self._folder, step)
        with _readable(path):
            if self._open is None or self._open[0] != step:
                self._open = step, parquet.ParquetFile(path, page_checksum_verification=True)
            rows = self._open[1].read_row_group(number).to_pylist(maps_as_pydicts="strict")
            return _group(rows, self._locate)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """A context that reports a file which cannot be read as a RollError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, IndexError, pyarrow.ArrowException) as error:
        remedy = "replay another run, or fewer steps (max_steps)"
        why = f"{type(error).__name__}: {error}"
        raise RollError(f"{path}: these rollouts cannot be read: {why}; {remedy}") from error


def _group(rows: Sequence[Mapping[str, Any]], locate: Locate | None) -> RolloutGroup:
    episodes = [_episode(row, locate) for row in rows if row["sample"] is not None]
    baselines = [_episode(row, locate) for row in rows if row["sample"] is None]
    first = rows[0]
    row = {} if first["ground_truth"] is None else {"ground_truth": first["ground_truth"]}
    prompt = Prompt(first["prompt_id"], np.zeros(0, np.int32), "", first["domain"], row, first["place"])
    group = RolloutGroup(observed(prompt, episodes), episodes, baselines[0] if baselines else None)
    return replace(group, began=first["began"], ended=first["ended"])


def _episode(row: Mapping[str, Any], locate: Locate | None) -> Episode:
    turns = tuple(TurnReward(turn["end"], turn["value"]) for turn in row["turns"])
    reward = RewardResult(row["reward"], RewardOutcome(row["outcome"]), row["parts"], row["note"], turns, row["score"])
    paths = [
        Trajectory([_read_segment(one) for one in path["segments"]], StopReason(path["stop"]))
        for path in row["trajectories"]
    ]
    # Files of earlier versions have no turns of partners.
    partners = tuple(PartnerTurn(turn["after"], turn["partner"], turn["text"]) for turn in row.get("partner_turns", ()))
    episode = Episode(paths, reward, row["turn_rewards"], row["turn_states"], row["metrics"], partners)
    return by_turns(episode, locate) if locate and not episode.turn_rewards else episode


def _read_segment(row: Mapping[str, Any]) -> Segment:
    log_probs, routes = row["log_probs"], row["routes"]
    if routes is not None:
        assert len(routes["experts"]) == math.prod(routes["shape"]), "routes of another shape"
        routes = np.array(routes["experts"], np.int16).reshape(routes["shape"])
    return Segment(
        np.array(row["token_ids"], np.int32),
        row["sampled"],
        None if log_probs is None else np.array(log_probs, np.float32),
        tuple(VersionRun(run["version"], run["tokens"]) for run in row["versions"]),
        row["text"],
        [json.loads(call) for call in row["calls"]],
        routes,
    )
