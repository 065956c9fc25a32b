"""Runs the tiny task, injects the faults of a campaign, and records their outcomes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_plan import ENDS_RUN, STEPS, TRAINER_SIDE, Kind, Phase, PlannedFault
from benchmarks.fault_watch import LOOK, STEP, Course, Said, Watch, is_running
from roll.runs.assemble import BACK_OFF_SECONDS

PLACEMENTS = ("one engine, adapter, judge behind a URL", "two engines, whole weights, judge in the run")
ROLES = {
    Kind.ENGINE: "actor_infer",
    Kind.CORE: "actor_infer",
    Kind.REWARD: "rewards.arithmetic",
    Kind.JUDGE: "rewards.judged",
}
"""Role of each kind of process that the run itself replaces."""
ENGINES = (Kind.ENGINE, Kind.CORE)
TIMED = ("time/", "throughput/", "memory/", "engine/", "run/", "judge/")
"""Prefixes of metrics that depend on time, on restarts, or on a judge's cache."""
SUSPENDED = 20.0
"""Seconds for which a driver is stopped. Then it receives SIGCONT, as from `fg`."""
PATIENCE = 4
"""Number of steps to wait for a phase. Afterwards the fault is injected in any phase."""
UNNOTICED = 3
"""Number of steps after which an engine whose death was never reported counts as replaced."""
LONGEST = 1200.0
"""Deadline of an attempt in seconds. A longer attempt counts as hanging."""
ALARM = re.compile(
    r"rank \d+ (died:|is replaced)|restart \d+ of \d+:|is stopped \(SIGSTOP\)|: its process \w+ on this host"
)
ECHO = 120.0
"""Seconds after a fault in which messages of the run may refer to it."""


@dataclass(frozen=True)
class Injected:
    """An injected fault and its outcome. Times are seconds since the epoch."""

    fault: PlannedFault
    at: float
    attempt: int
    step: int
    """Last step that was logged before the fault."""
    phases: tuple[str, ...]
    """Phases of the run when the fault was injected."""
    pid: int
    actor: int
    """Process id of the Ray actor. It differs from `pid` if vLLM's own process was hit."""
    rank: int
    noticed: float | None = None
    healed: float | None = None
    steps_lost: int = 0
    back_off: float = 0.0
    """Seconds that the run waited before the restart."""
    caught_up: float | None = None
    """Time at which the step in progress at the fault was logged."""


@dataclass(frozen=True)
class RunOutcome:
    """A run, with all its attempts."""

    number: int
    placement: str
    injected: tuple[Injected, ...]
    left: int
    """Number of faults that were not injected, because their phase did not occur."""
    statuses: tuple[int, ...]
    """Exit statuses of its attempts."""
    restarts: int
    """Number of restarts of the trainer's side."""
    false_alarms: tuple[str, ...]
    unequal: tuple[str, ...]
    """Metrics that differ from those of the undisturbed run, with their steps."""
    cold_start: float
    """Seconds from the start of the roles until engines and trainer have started, in the undisturbed run."""
    usual_step: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class World:
    """A folder with the warmed-up tiny model, problems of two domains, and runs."""

    folder: Path
    judge: str
    """The URL of a judge."""
    steps: int = STEPS

    def command(self, name: str, placement: int) -> list[str]:
        """Return the command of a run into the folder `name`."""
        given = {
            "output_dir": name,
            "pretrain": "warm/export",
            "max_steps": self.steps,
            "save_steps": 2,
            "eval_steps": 0,
            "validation": "null",
            "rollout_batch_size": 16,
            "max_restarts": 10,
            "actor_train.data_args.file_name": "mixed.jsonl",
            "actor_infer.generating_args.seeded": "true",
            "rewards.arithmetic.world_size": 1,
            "+rewards.judged": self._judge(placement),
        }
        if placement:
            given |= {"actor_infer.world_size": 2, "weight_sync.lora": "merged", "weight_sync.bucket_mib": 1}
        keys = [f"{key}={value}" for key, value in given.items()]
        return [sys.executable, "-m", "roll.pipeline", "--config-name", "tiny/tiny_rlvr_lora_zero3", *keys]

    def _judge(self, placement: int) -> str:
        """Return the section of the judge: one behind a URL that approves right answers, or the warmed-up policy, which
        writes a digit.
        """
        if not placement:
            asked = (
                f"judge_model_type: api, judge_model_name: equality, judge_api_url: '{self.judge}', judge_prompt: "
                f"{self.folder}/asked.txt"
            )
            return f"{{reward: llm_judge, {asked}}}"
        asked = (
            f"judge_model_type: inference, judge_prompt: {self.folder}/said.txt, judge_pattern: '([0-9])', "
            f"judge_max_score: 9"
        )
        model = "model_args: {model_name_or_path: warm/export, dtype: fp32}, strategy_args: {strategy_name: hf_infer}"
        sampling = "generating_args: {max_new_tokens: 4, temperature: 0.0}"
        return f"{{reward: llm_judge, template: raw, {asked}, {model}, {sampling}, world_size: 1}}"

    def start(self, name: str, placement: int, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a run in its own session, with additional environment variables. Its output goes to a file next to its
        folder.
        """
        env, command = os.environ | dict(environment or {}), self.command(name, placement)
        with (self.folder / f"{name}.out").open("ab") as out:
            return subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out, start_new_session=True, env=env)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a run's metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def still(self, placement: int) -> str:
        """Return the name of the undisturbed run with this placement. Run it first if it has no export yet.

        Raises:
            RuntimeError: the run failed.
        """
        name = f"still-{placement}"
        if not (self.folder / name / "export").exists() and (status := self.start(name, placement).wait(LONGEST)):
            raise RuntimeError(f"{name} ended with status {status}: see {self.folder / name}.out")
        return name


class Campaign:
    """One run and its injected faults."""

    def __init__(self, world: World, number: int, faults: Sequence[PlannedFault]) -> None:
        self._world, self._number, self._placement = world, number, number % len(PLACEMENTS)
        self._name = f"run-{number}"
        self._pending = deque(faults)
        self._injected: list[Injected] = []
        self._course = Course(world.folder / self._name)
        self._attempt = 0
        self._due = 0
        """Last logged step when the next fault became due."""

    def run(self) -> RunOutcome:
        """Run the command up to six times, until the run has completed all its steps. Return the outcome."""
        began, statuses = time.time(), list[int]()
        while not statuses or (statuses[-1] and len(statuses) < 6):
            statuses.append(self._one_attempt())
            self._attempt += 1
        still = self._world.still(self._placement)
        return RunOutcome(
            self._number,
            PLACEMENTS[self._placement],
            tuple(self._injected),
            len(self._pending),
            tuple(statuses),
            sum(bool(re.search(r"restart \d+ of", line.text)) for line in self._course.lines),
            false_alarms([(line.at, line.text) for line in self._course.lines], [one.at for one in self._injected]),
            differences(self._world.metrics(still), self._world.metrics(self._name)),
            cold_start(self._world.folder / still),
            usual_step(self._world.metrics(still)),
            time.time() - began,
        )

    def _one_attempt(self) -> int:
        """Run the command once, inject faults, and return its exit status."""
        process = self._world.start(self._name, self._placement)
        watch = Watch(process.pid, self._world.folder / self._name)
        try:
            while process.poll() is None:
                if time.time() - watch.began > LONGEST:
                    print(f"{self._name}: an attempt hangs", flush=True)
                    process.send_signal(signal.SIGTERM)
                    process.send_signal(signal.SIGCONT)
                    process.wait(LONGEST)
                    break
                self._course.look()
                phases = watch.phases()
                self._settle(watch, process)
                if self._pending and self._is_moment(self._pending[0], watch, phases):
                    self._inject(self._pending.popleft(), watch, phases)
                time.sleep(LOOK)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        ended = time.time()
        self._course.look()
        for place, one in enumerate(self._injected):
            if (
                one.fault.kind in ENDS_RUN
                and one.attempt == self._attempt
                and one.noticed is None
                and one.healed is None
            ):
                self._injected[place] = replace(one, noticed=ended)
        print(
            f"{self._name}: attempt {self._attempt + 1} ended with {process.returncode} at step {self._course.step}",
            flush=True,
        )
        return process.returncode

    def _is_moment(self, fault: PlannedFault, watch: Watch, phases: set[Phase]) -> bool:
        """Whether to inject a fault now."""
        victims = watch.victims(fault.kind)
        ill = [one for one in self._injected if one.healed is None]
        if not victims or not is_running(victims[self._rank(fault, victims)]):
            return False
        if fault.phase is Phase.START:
            return self._is_starting(fault, watch, victims)
        if ill and not (fault.at_once and ill[-1] is self._injected[-1]):
            return False
        if len(self._steps_of(watch)) < 2:  # the first step of an attempt takes unusually long
            return False
        before = next((one.step for one in reversed(self._injected) if one.fault.kind in TRAINER_SIDE), -2)
        if fault.kind in TRAINER_SIDE and self._course.step < before + 2:
            return False  # too soon: a second failure in the same step ends the run, as it should
        return fault.phase in phases or fault.at_once or self._course.step >= self._due + PATIENCE

    def _rank(self, fault: PlannedFault, victims: Mapping[int, int]) -> int:
        """Return the rank that a fault hits."""
        hurt = [one.rank for one in self._injected if one.fault.kind in ENGINES]
        rank = hurt[-1] if fault.phase is Phase.START and hurt else fault.rank
        return rank if rank in victims else min(victims)

    def _is_starting(self, fault: PlannedFault, watch: Watch, victims: Mapping[int, int]) -> bool:
        """Whether the target process is starting."""
        if fault.kind is Kind.DRIVER:
            here = [line.text for line in self._course.lines if line.at > watch.began]
            return any("starting Ray and" in text for text in here) and not any(
                "actor_infer has started" in text for text in here
            )
        hurt = next((one for one in reversed(self._injected) if one.fault.kind in ENGINES), None)
        if hurt is None or hurt.healed:  # too late: it has started, and is hit during its work
            return len(self._steps_of(watch)) > 1
        return hurt.attempt == self._attempt and victims.get(hurt.rank, hurt.actor) != hurt.actor

    def _steps_of(self, watch: Watch) -> list[Said]:
        """Return the lines of this attempt's steps."""
        return [line for line in self._course.lines if line.at > watch.began and STEP.match(line.text)]

    def _inject(self, fault: PlannedFault, watch: Watch, phases: set[Phase]) -> None:
        victims = watch.victims(fault.kind)
        rank = self._rank(fault, victims)
        pid, ill = victims[rank], any(one.healed is None for one in self._injected)
        starts = fault.phase is Phase.START and (fault.kind is Kind.DRIVER or ill)
        found = (fault.phase,) if starts else tuple(sorted(phases))
        actor = watch.victims(Kind.ENGINE).get(rank, pid) if fault.kind in ENGINES else pid
        now = time.time()
        os.kill(pid, signal.SIGSTOP if fault.is_stop else signal.SIGKILL)
        self._injected.append(Injected(fault, now, self._attempt, self._course.step, found, pid, actor, rank))
        self._due = self._course.step
        print(
            f"{self._name}: {fault.name} {rank} ({pid}) after step {self._course.step}, during "
            f"{', '.join(found) or '?'}",
            flush=True,
        )

    def _settle(self, watch: Watch, process: subprocess.Popen[bytes]) -> None:
        """Check whether open faults have healed."""
        for place, one in enumerate(self._injected):
            if one.healed is None or one.caught_up is None:
                self._injected[place] = self._settled(one, watch, process)
                if one.healed is None and (healed := self._injected[place].healed) is not None:
                    self._due = self._course.step
                    print(f"{self._name}: {one.fault.name} healed after {healed - one.at:.1f} s", flush=True)

    def _settled(self, one: Injected, watch: Watch, process: subprocess.Popen[bytes]) -> Injected:
        since, kind = self._course.since, one.fault.kind
        noticed, healed = one.noticed, one.healed
        steps = [
            (int(match[1]), line.at)
            for line in self._course.lines
            if line.at > one.at and (match := STEP.match(line.text))
        ]
        if one.attempt < self._attempt:
            healed = healed or next((at for _, at in steps if at > watch.began), None)
        elif kind in TRAINER_SIDE:
            found = since(one.at, r"restart \d+ of")
            noticed = found.at if found else None
            healed = next((at for _, at in steps if noticed and at > noticed), None)
        elif kind is Kind.CHILD:
            alive = [pid for pid in watch.victims(kind).values() if pid != one.pid and is_running(pid)]
            noticed = healed = time.time() if alive and healed is None else healed
        elif role := ROLES.get(kind):
            found = since(one.at, rf"{re.escape(role)} rank {one.rank} (died|is replaced)")
            noticed = found.at if found else None
            back = found and since(found.at, rf"{re.escape(role)} rank {one.rank} is back after")
            healed = back.at if back else None
            if (
                noticed is None and len(steps) > UNNOTICED and not is_running(one.pid)
            ):  # replaced together with all engines of the interrupted sync
                healed = steps[UNNOTICED][1]
        elif kind in (Kind.RAYLET, Kind.GCS):
            found = since(one.at, r"Ray: its process|the run ended: failed")
            noticed = found.at if found else None
        elif kind is Kind.DRIVER and one.fault.is_stop:
            if time.time() - one.at > SUSPENDED and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                process.send_signal(signal.SIGCONT)
            healed = next((at for _, at in steps), None)
        caught_up = next((at for step, at in steps if step > one.step), None)
        back_off = self._back_off(one) if kind in TRAINER_SIDE else 0.0
        return replace(
            one,
            noticed=noticed,
            healed=healed,
            caught_up=caught_up,
            steps_lost=self._steps_lost(one),
            back_off=back_off,
        )

    def _back_off(self, one: Injected) -> float:
        """Return the seconds of back-off before the restart after a fault. Runs are short, so all restarts of an
        attempt are recent.
        """
        found = self._course.since(one.at, r"restart \d+ of")
        number = int(re.findall(r"restart (\d+) of", found.text)[0]) if found else 1
        return BACK_OFF_SECONDS[min(number, len(BACK_OFF_SECONDS)) - 1]

    def _steps_lost(self, one: Injected) -> int:
        """Return the number of logged steps that were repeated because of a fault."""
        if one.fault.kind not in (*TRAINER_SIDE, *ENDS_RUN):
            return 0
        found = self._course.since(one.at, r"the run continues from|roles, to continue after step")
        if found is None or one.step < 0:
            return 0
        match = re.search(r"after step (\d+)$|checkpoint of step (\d+)$", found.text)
        return max(0, one.step - (int(match[1] or match[2]) if match else 0))


def false_alarms(lines: Sequence[tuple[float, str]], faults: Sequence[float]) -> tuple[str, ...]:
    """Return a run's messages about deaths and restarts that do not follow an injected fault within ECHO seconds."""
    return tuple(
        text for at, text in lines if ALARM.search(text) and not any(0 <= at - fault <= ECHO for fault in faults)
    )


def differences(expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the metrics that differ by more than rounding, with their steps."""
    if (steps := [line["step"] for line in found]) != (wanted := [line["step"] for line in expected]):
        return (f"steps {steps} instead of {wanted}",)
    different = []
    for before, after in zip(expected, found, strict=True):
        for name in sorted(before.keys() | after.keys()):
            if not name.startswith(TIMED):
                one, other = before.get(name), after.get(name)
                if one is None or other is None or abs(one - other) > 1e-5 * max(1.0, abs(one)):
                    different.append(f"step {before['step']}: {name}: {other} instead of {one}")
    return tuple(different)


def cold_start(folder: Path) -> float:
    """Return the seconds from the start of a run's roles until the last has started."""
    course = Course(folder)
    course.look()
    begin = course.since(0.0, "starting Ray and")
    ends = [line.at for line in course.lines if " has started, " in line.text]
    return max(ends) - begin.at if begin and ends else 0.0


def usual_step(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the median duration of the steps after the first, in seconds."""
    times = sorted(line["time/step"] for line in lines if line["step"] > 1)
    return times[len(times) // 2]
