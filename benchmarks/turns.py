"""Measures vLLM's own `LLM` on the episodes of a run, turn by turn, without an environment between turns."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.floors import LOG_PROBS, Figures, adapter_request, bare_engine
from benchmarks.models import END_ID
from benchmarks.work import AgentWork


@dataclass(frozen=True)
class Turn:
    """Numbers of given tokens and of the sampled tokens after them."""

    given: int
    sampled: int


Recorded = Sequence[Turn]
"""An episode, turn by turn."""


def recorded(file: Path) -> list[list[list[Recorded]]]:
    """Return the episodes of `samples.jsonl` by step and group.

    Raises:
        ValueError: an episode has several trajectories.
    """
    steps: defaultdict[int, list[list[Recorded]]] = defaultdict(list)
    for line in file.read_text().splitlines():
        group = json.loads(line)
        steps[group["step"]].append([_turns(response["trajectories"]) for response in group["responses"]])
    return [steps[step] for step in sorted(steps)]


def _turns(trajectories: Sequence[dict[str, Any]]) -> Recorded:
    if len(trajectories) != 1:
        raise ValueError(f"an episode has {len(trajectories)} trajectories; the benchmark's have one")
    turns, given = [], 0
    for segment in trajectories[0]["segments"]:
        if not segment["sampled"]:
            given += segment["length"]
        elif segment["length"]:
            turns.append(Turn(given, segment["length"]))
            given = 0
    return turns


def turns(work: AgentWork, rank: int, device: str, timer: Any) -> Figures:
    """Return the seconds of each step of the run. `timer` is not used, because each step is played once, as in the
    run.
    """
    llm = bare_engine(work, device)
    adapter = adapter_request(work, rank)
    steps = recorded(Path(work.scratch) / "run" / "samples.jsonl")
    kept = LOG_PROBS if work.behaviour == "engine" else {}
    seconds = []
    for number, groups in enumerate(steps):
        llm.reset_prefix_cache()  # as after a weight sync
        own = [(index, episode) for index, group in enumerate(groups[rank :: work.engines]) for episode in group]
        begin = time.perf_counter()
        _play(llm, own, number, kept, adapter)
        seconds.append(time.perf_counter() - begin)
    # A spawned process runs no exit handlers, so its engine's process would outlive it.
    llm.llm_engine.engine_core.shutdown()
    return {"seconds": seconds}


def _play(llm: Any, episodes: Sequence[tuple[int, Recorded]], step: int, kept: dict[str, Any], adapter: Any) -> None:
    """Request each turn as soon as the previous one has ended. Given tokens are random. A group's episodes begin with
    the same tokens.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    drawn = random.Random(step)
    contexts: list[list[int]] = []
    for group, episode in episodes:
        first = random.Random(f"{step} {group}")
        contexts.append([first.randrange(END_ID) for _ in range(episode[0].given)] if episode else [])

    def ask(index: int, turn: int) -> None:
        count = episodes[index][1][turn].sampled
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **kept)
        prompt = TokensPrompt(prompt_token_ids=list(contexts[index]))
        llm.llm_engine.add_request(f"{step}-{index}-{turn}", prompt, sampling, lora_request=adapter)

    for index, (_, episode) in enumerate(episodes):
        if episode:
            ask(index, 0)
    while llm.llm_engine.has_unfinished_requests():
        for output in (one for one in llm.llm_engine.step() if one.finished):
            index, turn = map(int, output.request_id.split("-")[1:3])
            contexts[index] += output.outputs[0].token_ids
            if turn + 1 < len(episodes[index][1]):
                contexts[index] += (drawn.randrange(END_ID) for _ in range(episodes[index][1][turn + 1].given))
                ask(index, turn + 1)
