"""Learning from feedback: the teacher is the policy itself, with hints in its prompt.

groups ──▶ hints of each response ──▶ teacher's prompts ──▶ log T of the response's tokens ──┐
                                      policy's prompts ──▶ log S of the response's tokens ──▶ log T - log S
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll.algorithms.self_distillation import TokenGains, token_gains
from roll.config.derived.hints import BLOCK, longest_teacher_prompt
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.self_distillation import SelfDistillationConfig
from roll.data.chat import TemplateFault
from roll.data.prompts import Prompts, PromptSet
from roll.data.rows import RowFault
from roll.data.teacher_prompts import Hints, TeacherPrompts, solution_at, teacher_prompts
from roll.errors import BadInput, Fault
from roll.rewards.passing import Bars, passed
from roll.rollout.batch import Experience
from roll.rollout.hints import step_hints, taught_sequences, taught_tokens
from roll.rollout.reference import LogProbs
from roll.runs.device_phases import DevicePhases
from roll.runs.rlvr.reward_trial import first_prompts, prompt_sets
from roll.training.actor_train import ActorTrain, Reference
from roll.types import Episode, Floats, Ints, Metrics, Prompt, RolloutGroup


@dataclass(frozen=True)
class StepHints:
    """Writes the teacher's prompts of a step."""

    keys: SelfDistillationConfig
    write: TeacherPrompts
    bars: Mapping[str, Bars]
    """When a response passes, by domain."""
    most: int
    """Longest prompt of the teacher, in tokens."""

    def prompts(self, groups: Sequence[RolloutGroup], step: Experience) -> tuple[dict[int, Ints], Metrics]:
        """Return the teacher's prompts by the index of the sequence, and the shares of responses with and without one.

        Only responses in the loss count.
        """
        found = step_hints(groups, self.keys.sees, self._passed, self._solution)
        assert len(found) == len(step.sequences), "every response is one sequence"
        in_loss = np.flatnonzero(step.sequences.response_lengths).tolist()
        hinted = [row for row in in_loss if found[row][1]]
        asked = [(found[row][0].row, found[row][1]) for row in hinted]
        prompts = dict(zip(hinted, self.write.token_ids(asked), strict=True))
        taught = {row: token_ids for row, token_ids in prompts.items() if len(token_ids) <= self.most}
        count = max(len(in_loss), 1)
        metrics = {
            f"{BLOCK}/taught_fraction": len(taught) / count,
            f"{BLOCK}/without_hint_fraction": (len(in_loss) - len(hinted)) / count,
            f"{BLOCK}/too_long_fraction": (len(hinted) - len(taught)) / count,
        }
        for kind in self.keys.sees:
            metrics[f"{BLOCK}/{kind}_fraction"] = sum(kind in found[row][1] for row in taught) / count
        return taught, metrics

    def _passed(self, prompt: Prompt, episode: Episode) -> bool:
        return passed(episode, self.bars[prompt.domain])

    def _solution(self, prompt: Prompt) -> str | None:
        return solution_at(prompt.row, self.keys.solution_column)


@dataclass(frozen=True)
class SelfTeacher:
    """Scores the responses of a step with the teacher's prompts."""

    hints: StepHints
    student: LogProbs
    """The log-probs of the policy before the step's first update."""
    teacher: LogProbs
    teacher_role: str
    phases: DevicePhases
    part: Callable[[str], AbstractContextManager[None]]
    """Times the calls as `self_teacher`; see `Meter.part`."""

    async def gains(self, groups: Sequence[RolloutGroup], step: Experience, log_probs: Floats | None) -> TokenGains:
        """Return what the teacher says about the tokens of a step.

        Args:
            log_probs: [T], log-probs of the policy before the step's first update. None if nothing else needed them:
                they are then computed for the responses that are taught.
        """
        with self.part("self_teacher"):
            prompts, metrics = await asyncio.to_thread(self.hints.prompts, groups, step)
        tokens = len(step.sequences.token_ids)
        if not prompts:
            return TokenGains(np.zeros(tokens, np.float32), np.zeros(tokens, np.bool_), metrics)
        both = taught_sequences(step.sequences, prompts)
        taught = taught_tokens(step.sequences, both.rows)
        if log_probs is None:
            await self.phases.scoring("actor_train")
            with self.part("self_teacher"):
                student = (await self.student(both.student))[both.student.response_mask]
        else:
            student = log_probs[taught]
        await self.phases.scoring(self.teacher_role)
        with self.part("self_teacher"):
            teacher = (await self.teacher(both.teacher))[both.teacher.response_mask]
        gains = np.zeros(tokens, np.float32)
        gains[taught] = found = token_gains(teacher, student, self.hints.keys.clip)
        metrics |= {f"{BLOCK}/gain_mean": float(found.mean()), f"{BLOCK}/gain_std": float(found.std())}
        return TokenGains(gains, taught, metrics)


def self_teacher_of(
    hints: StepHints | None,
    actor_train: ActorTrain,
    reference: Reference | ActorTrain,
    phases: DevicePhases,
    part: Callable[[str], AbstractContextManager[None]],
) -> SelfTeacher | None:
    """Return the self-teacher; None without hints. `reference` computes the reference's log-probs."""
    if hints is None:
        return None
    role, scored = "actor_train", actor_train.log_probs
    if hints.keys.teacher == "frozen":
        role, scored = role if reference is actor_train else "reference", reference.ref_log_probs
    if hints.keys.teacher == "averaged":
        scored = actor_train.averaged_log_probs
    return SelfTeacher(hints, actor_train.log_probs, scored, role, phases, part)


def step_hints_of(
    config: RlvrConfig, tokenizer: PreTrainedTokenizerBase, training: Prompts, bars: Mapping[str, Bars]
) -> StepHints | None:
    """Return what writes a self-teacher's prompts, tried on the first prompt of each domain; None without the block.

    Raises:
        BadInput: no row has a solution, or one that is no text; no response of a domain can pass; or a template refuses
            the teacher's prompt.
    """
    keys, rows = config.self_distillation, config.actor_train.data_args
    if keys is None:
        return None
    assert rows is not None, "the configuration was checked: single responses answer rows"
    write = teacher_prompts(keys, rows, tokenizer)
    faults = [*_without_bars(keys, bars)]
    if "solution" in keys.sees:
        faults += _solution_faults(keys.solution_column, list(prompt_sets(training)))
    if faults := faults or [*_trial(write, first_prompts(training))]:
        raise BadInput(*faults)
    return StepHints(keys, write, bars, longest_teacher_prompt(config))


def _without_bars(keys: SelfDistillationConfig, bars: Mapping[str, Bars]) -> Iterator[Fault]:
    """Yield a fault for each domain of which it is not known when a response passes, if a hint depends on it."""
    kinds = [kind for kind in keys.sees if kind != "solution"]
    for domain in [domain for domain, own in bars.items() if not own and kinds]:
        problem = f"missing, but self_distillation sees {kinds[0]}, which depends on whether a response passes"
        yield Fault(f"rewards.{domain}.passes_at", problem, "set it to the smallest reward that passes", "missing")


def _solution_faults(column: str, sets: Sequence[PromptSet]) -> list[Fault]:
    """Return the faults of rows whose solution is no text, or one fault if no row has a solution."""
    has_any, faults, columns = False, list[Fault](), dict[str, None]()
    for prompts in sets:
        bad = list[tuple[int, RowFault]]()
        for index, row in [pair for domain in prompts.domains for pair in prompts.rows(domain)]:
            columns |= dict.fromkeys(row)
            try:
                has_any |= solution_at(row, column) is not None
            except RowFault as fault:
                bad.append((index, fault))
        faults += prompts.faults(sorted(bad, key=lambda pair: pair[0]))
    if has_any or faults:
        return faults
    problem = f"'{column}', but no row has a value there"
    return [Fault(f"{BLOCK}.solution_column", problem, f"name one of: {', '.join(columns)}", "unknown_name")]


def _trial(write: TeacherPrompts, firsts: Mapping[str, Prompt]) -> Iterator[Fault]:
    """Yield a fault for each domain whose first prompt cannot be written with hints."""
    for prompt in firsts.values():
        hints: Hints = dict.fromkeys(write.keys.sees, "a hint")
        try:
            write.token_ids([(prompt.row, hints)])
        except (RowFault, TemplateFault) as fault:
            yield Fault(prompt.place, f"the teacher's prompt cannot be written: {fault}", "change the row", "unfit")
