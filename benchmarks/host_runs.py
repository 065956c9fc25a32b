"""Runs the tiny task over hosts of a lab, strikes one of them, and records what the run made of it."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from tests import limits
from tests.hosts.clusters import ended, start_cluster, train
from tests.hosts.lab import SHARED, Host, Lab, lab

STEPS = 12
STRUCK_AFTER = 1
"""The step after whose record the fault comes."""
FURTHER_STEPS = 3
"""Steps that a run trains on after the fault that ended it."""
LONGEST = 600.0
"""Seconds after the fault in which a run must have ended."""
GONE_SECONDS = 100.0
"""Seconds after the end of a run in which all that it left must be gone. Ray itself takes 60 to find a lost head."""
NOTICED = re.compile(r"died|is replaced|restart \d+ of|is lost|not reached|does not answer|was stopped|: .*Error|full")
"""What a line says that tells of a fault."""
RAY_OWN = re.compile(
    r"raylet|gcs_server|dashboard|ray::(DashboardAgent|RuntimeEnvAgent|IDLE)|resource_tracker|forkserver|monitor\.py"
    r"|default_worker|ray\.util\.client"
)
"""Processes of the Ray cluster, which outlives the run."""
DEADLINES = {
    "RAY_health_check_timeout_ms": "10000",
    "RAY_gcs_rpc_server_connect_timeout_s": "30",
    "RAY_gcs_server_request_timeout_seconds": "60",
}
"""Ray's own defaults, in place of the long deadlines of the tests."""
SMALL = {
    "pretrain": "warm/export",
    "max_steps": STEPS,
    "save_steps": 3,
    "eval_steps": 0,
    "validation": "null",
    "track_with": "none",
    "use_kl_loss": "false",
    "rollout_batch_size": 16,
    "actor_infer.generating_args.seeded": "true",
    "actor_train.world_size": 1,
    "rewards.arithmetic.world_size": 1,
    "+actor_infer.system_envs": "{TORCHDYNAMO_DISABLE: '1'}",
    "deadlines.start": 300,
    "deadlines.train": 120,
    "deadlines.collective": 90,
    "deadlines.weight_sync": 90,
    "deadlines.rollout": 120,
}

LEFT_OUT = ("~reference", "~kl_loss_coef")
"""Keys of the tiny task without which it starts sooner."""


@dataclass(frozen=True)
class Passing:
    """A fault that ends while the run goes on."""

    seconds: float
    """How long it lasts."""
    end: Callable[[], None]
    """Ends it."""


Fault = Callable[[Lab], Passing | None]
"""Does something to the hosts, and returns how it ends, None for never."""


@dataclass(frozen=True)
class Blow:
    """What a fault did to a run. Times are seconds after its begin."""

    trained: float | None
    """Time of the next step that began and ended after it, None without one."""
    noticed: float | None
    """Time of the first line that tells of the fault."""
    said: Sequence[str]
    """The lines that tell of it."""
    there: Sequence[str]
    """The run's processes on the second host once it trained on, or ended."""


@dataclass(frozen=True)
class Struck:
    """What happened to a run whose hosts were struck."""

    blows: Sequence[Blow]
    status: int | None
    """Exit status, None if the run had not ended after LONGEST."""
    ended: float
    """Seconds from the last fault to the end."""
    said: Sequence[str]
    """All lines that the run printed."""
    left: Mapping[str, Sequence[str]]
    """By host, what is left of the run there: processes and files."""
    again: tuple[int, Sequence[str]] | None = None
    """Exit status and lines of the same command after `mend`; None if it was not started again."""

    @property
    def last_line(self) -> str:
        return last_line(self.said)


def last_line(said: Sequence[str]) -> str:
    """Return the last line with any text."""
    return next((line.strip() for line in reversed(said) if line.strip()), "")


@dataclass
class Output:
    """The lines that a process prints, with the time of each."""

    lines: list[tuple[float, str]] = field(default_factory=list)

    def follow(self, process: subprocess.Popen[str]) -> None:
        """Read lines until the process ends."""
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))


def strike(
    world: Path,
    name: str,
    overrides: Mapping[str, object],
    faults: Sequence[Fault],
    folder: str = SHARED,
    disk: str = "4g",
    driver: int = 0,
    before: Callable[[Lab], object] = lambda _: None,
    mend: Callable[[Lab], object] | None = None,
) -> Struck:
    """Run the tiny task over two hosts, strike it after its first step and after each recovery, and wait for its end.

    Args:
        world: folder with the model, the problems and the warmed-up policy, which all hosts share.
        overrides: keys of the placement.
        faults: each strikes once the run has trained a step since the one before, if it is still on both hosts.
        folder: where the run folder is on the driver's host.
        disk: size of each host's `/tmp`.
        driver: the driver's host, 1 for the second. Ray's head is on the first.
        before: what to do to the hosts before Ray starts.
        mend: ends a fault that ended the run. The same command is then started again, in a new cluster, for
            `FURTHER_STEPS` steps.
    """
    with lab(2, shared=world, disk=disk) as made:
        for host in made.hosts:
            host.environment.update(DEADLINES)
        before(made)
        joined = start_cluster(made)
        files = {host.name: _files(host) for host in made.hosts}
        words = _words({"output_dir": f"{folder}/{name}", **SMALL, **overrides})
        run, output = train(made.hosts[driver], joined, *words, folder=SHARED), Output()
        following = threading.Thread(target=output.follow, args=(run,), daemon=True)
        following.start()
        records = made.hosts[driver].path(f"{folder}/{name}/metrics.jsonl")
        times, there = list[tuple[float, float | None]](), list[list[str]]()
        for fault in faults:
            if times and (times[-1][1] is None or not there[-1]):
                break  # the last one ended it, or it hangs, or the run has left the second host
            times.append(_struck(made, run, records, fault))
            there.append(_programs(made.hosts[1]))
        while run.poll() is None and time.monotonic() < times[-1][0] + LONGEST:
            time.sleep(0.5)
        seconds, status = time.monotonic() - times[-1][0], run.poll()
        left = {host.name: _left(made, host, files[host.name]) for host in made.hosts} if status is not None else {}
        if status is None:
            run.kill()
        following.join(limits.END)
        again = None
        if mend is not None and status:
            mend(made)
            again = _run_again(made, made.hosts[driver], [*words, f"max_steps={_steps(records) + FURTHER_STEPS}"])
    ends = [*(at for at, _ in times[1:]), float("inf")]
    blows = [_blow(output, *seen, end, programs) for seen, end, programs in zip(times, ends, there, strict=True)]
    said = [line for _, line in output.lines]
    return Struck(blows, status, seconds, said, left, again)


def _words(keys: Mapping[str, object]) -> list[str]:
    changed = (f"{key}={value}" for key, value in keys.items())
    return ["--config-name", "tiny/tiny_rlvr_lora_zero3", *LEFT_OUT, *changed]


def _run_again(made: Lab, driver: Host, words: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Run the command to its end in a new cluster. Return its exit status and lines."""
    made.hosts[0].run("python", "-m", "roll.cluster", "hostfile", "stop", "--run", check=False)
    status, said = ended(train(driver, start_cluster(made), *words, folder=SHARED))
    return status, said.splitlines()


def _struck(made: Lab, run: subprocess.Popen[str], records: Path, fault: Fault) -> tuple[float, float | None]:
    """Strike a run once it trains. Return the time of the fault, and the time at which it trained again, None if it did
    not.
    """
    before = _steps(records)
    limits.until(
        lambda: run.poll() is not None or _steps(records) >= max(STRUCK_AFTER, before + 1), "it trains", limits.RUN
    )
    assert run.poll() is None, f"the run ended with {run.poll()} before a fault"
    began, trained = time.monotonic(), None
    passing = fault(made)
    # The step under way may have needed nothing of the host.
    after = _steps(records) + 2
    while (passing or trained is None) and run.poll() is None and time.monotonic() < began + LONGEST:
        if passing and time.monotonic() >= began + passing.seconds:
            passing.end()
            passing = None
        if trained is None and _steps(records) >= after:
            trained = time.monotonic()
        time.sleep(0.2)
    if passing:
        passing.end()
    return began, trained


def _blow(output: Output, began: float, trained: float | None, until: float, there: Sequence[str]) -> Blow:
    told = [(at - began, line) for at, line in output.lines if began < at < until and NOTICED.search(line)]
    again = None if trained is None else trained - began
    return Blow(again, told[0][0] if told else None, [f"{at:.0f} s: {line}" for at, line in told], there)


def _steps(records: Path) -> int:
    """Return the number of the last recorded step, -1 if there is none."""
    lines = records.read_text().splitlines() if records.exists() else []
    return len(lines) - 1


def _left(made: Lab, host: Host, before: Set[str]) -> list[str]:
    """Wait until nothing of the run is left on a host that is back, and return what is left after GONE_SECONDS.

    `before`: the files on the host before the run.
    """
    if not _lives(host):
        return []
    host.freeze(still=False)
    made.cut(host, off=False)
    end = time.monotonic() + GONE_SECONDS
    while (found := _found(host, before)) and time.monotonic() < end:
        time.sleep(1)
    return found


def _found(host: Host, before: Set[str]) -> list[str]:
    return _programs(host) + sorted(_files(host) - before)


def _lives(host: Host) -> bool:
    return Path(f"/proc/{host.init}").exists()


def _programs(host: Host) -> list[str]:
    """Return the run's processes on a host, none on one that died."""
    return [line[:80] for line in host.programs() if not RAY_OWN.search(line)] if _lives(host) else []


def _files(host: Host) -> set[str]:
    """Return what is in the folders for temporary files, except the benchmark's own, and torch's cache of kernels."""
    found = {path for folder in ("/tmp", "/dev/shm") for path in host.path(folder).iterdir()}
    return {path.name for path in found if path.name != "filled" and not path.name.startswith("torchinductor_")}
