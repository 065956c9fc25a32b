"""Runs the tiny task over hosts of a lab, strikes one of them, and records what the run made of it."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import limits
from tests.hosts.clusters import start_cluster, train
from tests.hosts.lab import SHARED, Host, Lab, lab

STEPS = 12
STRUCK_AFTER = 1
"""The step after whose record the fault comes."""
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
class Struck:
    """What happened to a run whose host was struck. Times are seconds after the fault."""

    status: int | None
    """Exit status, None if the run had not ended after LONGEST."""
    noticed: float | None
    """Time of the first line that tells of the fault."""
    ended: float
    said: Sequence[str]
    """All lines that the run printed."""
    left: Mapping[str, Sequence[str]]
    """By host, what is left of the run there: processes and files."""

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.said) if line.strip()), "")


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
    fault: Callable[[Lab, Path], None],
    folder: str = SHARED,
    disk: str = "4g",
) -> Struck:
    """Run the tiny task over two hosts, strike it after its first step, and wait for its end.

    Args:
        world: folder with the model, the problems and the warmed-up policy, which all hosts share.
        overrides: keys of the placement.
        fault: does it, given the lab and the run folder. It may wait.
        folder: where the run folder is on the first host, which has the driver.
        disk: size of each host's `/tmp`.
    """
    with lab(2, shared=world, disk=disk) as made:
        for host in made.hosts:
            host.environment.update(DEADLINES)
        joined = start_cluster(made)
        keys = {"output_dir": f"{folder}/{name}", **SMALL, **overrides}
        words = [*LEFT_OUT, *(f"{key}={value}" for key, value in keys.items())]
        run, output = (
            train(made.hosts[0], joined, "--config-name", "tiny/tiny_rlvr_lora_zero3", *words, folder=SHARED),
            Output(),
        )
        following = threading.Thread(target=output.follow, args=(run,), daemon=True)
        following.start()
        run_folder = made.hosts[0].path(f"{folder}/{name}")
        records = run_folder / "metrics.jsonl"
        limits.until(
            lambda: run.poll() is not None or _steps(records) >= STRUCK_AFTER,
            f"{name} has trained step {STRUCK_AFTER}",
            limits.RUN,
        )
        assert run.poll() is None, "\n".join(line for _, line in output.lines)
        began = time.monotonic()
        fault(made, run_folder)
        while run.poll() is None and time.monotonic() < began + LONGEST:
            time.sleep(0.5)
        ended = time.monotonic() - began
        status = run.poll()
        left = {host.name: _left(made, host) for host in made.hosts} if status is not None else {}
        if status is None:
            run.kill()
        following.join(limits.END)
    told = [at - began for at, line in output.lines if at > began and NOTICED.search(line)]
    return Struck(status, told[0] if told else None, ended, [line for _, line in output.lines], left)


def _steps(records: Path) -> int:
    """Return the number of the last recorded step, -1 if there is none."""
    lines = records.read_text().splitlines() if records.exists() else []
    return len(lines) - 1


def _left(made: Lab, host: Host) -> list[str]:
    """Wait until nothing of the run is left on a host that is back, and return what is left after GONE_SECONDS."""
    if not Path(f"/proc/{host.init}").exists():
        return []
    host.freeze(still=False)
    made.cut(host, off=False)
    end = time.monotonic() + GONE_SECONDS
    while (found := _found(host)) and time.monotonic() < end:
        time.sleep(1)
    return found


def _found(host: Host) -> list[str]:
    programs = [line[:80] for line in host.programs() if not RAY_OWN.search(line)]
    files = [
        str(path.name)
        for folder in ("/tmp", "/dev/shm")
        for path in host.path(folder).iterdir()
        if path.name.startswith(("roll-", "psm_", "sem."))
    ]
    return programs + files
