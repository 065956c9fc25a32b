"""Tables of a campaign of faults: by kind, by phase, by run, the cost of a failure, and the resulting effective
training time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fault_plan import ENDS_RUN, TRAINER_SIDE, Kind
from roll.runs.assemble import BACK_OFF_SECONDS

FAILURE_EVERY = 3600.0
"""Assumed seconds between two failures of a cluster of 64 GPUs."""
STEP = 60.0
"""Assumed seconds of a step on that cluster."""
ENGINES = 32
"""Number of engines, one on each of 32 GPUs. The trainer has the other 32."""
ENGINE_SHARE = 0.5
"""Assumed share of the failures that hit an engine's GPU."""
STARTS = {"engine": 120.0, "trainer": 180.0}
"""Assumed seconds of a cold start: of an engine with a 7B model and CUDA graphs, and of a trainer that loads its
checkpoint.
"""
SAVE_STEPS = 10
"""Assumed number of steps between two checkpoints."""
COSTLY = (Kind.ENGINE, Kind.CORE, *TRAINER_SIDE, *ENDS_RUN)
SLACK = 10.0
"""Allowed seconds of a failure in addition to a cold start, for noticing it and for the back-off."""


def is_good(outcome: Mapping[str, Any]) -> bool:
    """Whether a run completed all its steps, with the metrics of the undisturbed run and without false alarms."""
    return outcome["statuses"][-1] == 0 and not outcome["unequal"] and not outcome["false_alarms"]


def markdown(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return all tables."""
    faults = [one | {"outcome": outcome} for outcome in outcomes for one in outcome["injected"]]
    parts = [by_kind(faults), by_phase(faults), of_runs(outcomes), costs(faults), effective(faults)]
    return "\n\n".join(parts) + "\n"


def by_kind(faults: Sequence[Mapping[str, Any]]) -> str:
    """Return the table with a row for each kind of fault."""
    lines = [
        "| fault | injected | noticed, s: median, largest | healed, s: median, largest | repeated steps: mean, largest "
        "| not healed |",
        "|---|---|---|---|---|---|",
    ]
    kinds = defaultdict(list)
    for one in faults:
        kinds[(one["fault"]["kind"], one["fault"]["is_stop"])].append(one)
    for kind in Kind:
        for is_stop in (False, True):
            if found := kinds.get((kind, is_stop)):
                lost = [one["steps_lost"] for one in found]
                cells = [
                    f"{'stop' if is_stop else 'kill'} {kind}",
                    str(len(found)),
                    spread([one["noticed"] - one["at"] for one in found if one["noticed"]]),
                    spread([one["healed"] - one["at"] for one in found if one["healed"]]),
                    f"{statistics.mean(lost):.1f}, {max(lost)}",
                    str(sum(one["healed"] is None for one in found)),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(seconds: Sequence[float]) -> str:
    """Return the median and the largest of some durations as text."""
    return f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"


def by_phase(faults: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of faults in each phase, as a table. A fault counts in every phase that the run was in when it
    was injected, whether or not the fault was planned for that phase.
    """
    counts: dict[str, int] = defaultdict(int)
    for one in faults:
        for phase in one["phases"] or ["between two phases"]:
            counts[phase] += 1
    return "| phase | faults |\n|---|---|\n" + "\n".join(
        f"| {phase} | {count} |" for phase, count in sorted(counts.items())
    )


def of_runs(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return the table with a row for each run."""
    lines = [
        "| run | placement | faults | not injected | exit statuses | restarts of the trainer's side | false alarms "
        "| unequal metrics | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        statuses = ", ".join(map(str, outcome["statuses"]))
        lines.append(
            f"| {outcome['number']} | {outcome['placement']} | {len(outcome['injected'])} | {outcome['left']} | "
            f"{statuses} | {outcome['restarts']} | {len(outcome['false_alarms'])} | {len(outcome['unequal'])} | "
            f"{outcome['seconds']:.0f} |"
        )
    return "\n".join(lines)


def cost(one: Mapping[str, Any]) -> float | None:
    """Return the seconds from a fault until the step in progress was logged, minus a usual step.

    None if that step was never logged or if another fault overlaps.
    """
    if one["caught_up"] is None or any(
        overlap(one, other) for other in one["outcome"]["injected"] if other["at"] != one["at"]
    ):
        return None
    return one["caught_up"] - one["at"] - one["outcome"]["usual_step"]


def overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether another fault caused a restart of an engine, the trainer's side or the run at the same time."""
    end = other["healed"] or float("inf")
    return other["fault"]["kind"] in COSTLY and other["at"] < one["caught_up"] and end > one["at"]


def costs(faults: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the cost of failures that overlap no other, compared with the allowed cost."""
    lines = ["| failure | seconds: median, largest | allowed | above the allowed time |", "|---|---|---|---|"]
    groups = {
        "engine": ((Kind.ENGINE, Kind.CORE), "cold start + 10 s + the rest of the trainer's step"),
        "rank": (TRAINER_SIDE, "cold start + 10 s + the steps since the checkpoint"),
        "driver, Ray": (ENDS_RUN, "a start of the run + 10 s + the steps since the checkpoint"),
    }
    for name, (kinds, bound) in groups.items():
        found = [
            (one, seconds) for one in faults if one["fault"]["kind"] in kinds and (seconds := cost(one)) is not None
        ]
        over = [seconds for one, seconds in found if seconds > allowed(one)]
        lines.append(
            f"| {name} | {spread([seconds for _, seconds in found])} | {bound} | {len(over)} of {len(found)} |"
        )
    return "\n".join(lines)


def allowed(one: Mapping[str, Any]) -> float:
    """Return the allowed seconds of a failure: a cold start, `SLACK`, the repeated steps, and the step in progress.

    A back-off beyond the first one is added, because only the frequent failures of a campaign cause it.
    """
    outcome = one["outcome"]
    repeated = max(0.0, one["back_off"] - BACK_OFF_SECONDS[0])
    return outcome["cold_start"] + SLACK + repeated + (1 + one["steps_lost"]) * outcome["usual_step"]


def effective(faults: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on the effective training time on 64 GPUs, from these measurements and the assumptions
    above.
    """
    notice = {
        name: statistics.mean(
            [one["noticed"] - one["at"] for one in faults if one["fault"]["kind"] in kinds and one["noticed"]]
            or [SLACK]
        )
        for name, kinds in {"engine": (Kind.ENGINE, Kind.CORE), "trainer": TRAINER_SIDE}.items()
    }
    engine = (notice["engine"] + STARTS["engine"]) / ENGINES
    rank = notice["trainer"] + SLACK + STARTS["trainer"] + SAVE_STEPS / 2 * STEP
    share = 1 - (ENGINE_SHARE * engine + (1 - ENGINE_SHARE) * rank) / FAILURE_EVERY
    return (
        f"Effective training time on 64 GPUs, half of them engines, with steps of {STEP:.0f} s, a checkpoint every "
        f"{SAVE_STEPS} steps and "
        f"a failure every {FAILURE_EVERY:,.0f} s. Cold starts of {STARTS['engine']:.0f} s (engine) and "
        f"{STARTS['trainer']:.0f} s (trainer) "
        f"are assumed; failures are noticed after {notice['engine']:.1f} s and {notice['trainer']:.1f} s, as measured "
        f"here. An engine's failure then costs {engine:.1f} s, because {ENGINES - 1} other engines continue, and a "
        f"rank's failure {rank:.0f} s, and **{100 * share:.1f}%** of the time is spent on training."
    )
