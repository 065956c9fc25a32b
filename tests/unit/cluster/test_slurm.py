"""The Slurm script, run with stubs of Slurm's, Ray's and Python's programs. tests/integration/test_slurm.py runs it
with Ray itself.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from tests import limits

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "slurm" / "rlvr.sbatch"
PROGRAMS = {
    "scontrol": 'printf "one\\ntwo\\nthree\\n"',
    # As on Debian. The script must ask for the address from which the last node is reached.
    "hostname": "echo 127.0.1.1",
    # The file `there` gets one line for each node that joins the cluster. The node `$lost` starts, but never joins.
    "ray": """
case $1 in
  start) echo "$node: $* token ${RAY_AUTH_TOKEN:+given}" >>started
    [ "$node" != "$fails" ] || { echo "no such device" >&2; exit 1; }
    [ "$node" = "$lost" ] || echo " 1 node_$node" >>there
    exec sleep 3600 ;;
  status) [ "$RAY_ADDRESS" = 10.0.0.1:6387 ] && cat there ;;
esac""",
    "srun": """
while [ "${1#-}" != "$1" ]; do case $1 in --nodelist=*) node=${1#*=} ;; esac; shift; done
export node
exec "$@" """,
    "python": """
if [ "$2" = roll.system.addresses ]; then [ "$3" = three ] && echo 10.0.0.1; exit; fi
trap 'echo checkpoint >>ran; exit 130' TERM
echo "$RAY_ADDRESS $*" >>ran
[ -z "$long" ] || while true; do sleep 0.1; done
[ "$(wc -l <ran)" -gt "$dies" ] || kill -KILL $$
exit 7""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job on three nodes, with the stubs on its PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "there").touch()
    job = {
        "SLURM_JOB_NODELIST": "[one,two,three]",
        "SLURM_JOB_ID": "4007",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "8",
    }
    return job | {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "node": "one",
        "fails": "",
        "lost": "",
        "long": "",
        "dies": "0",
    }


CLOCK = """unset SECONDS # bash no longer counts them
SECONDS=0
sleep() {
  command sleep 0.1
  [ "$(wc -l <there)" -lt 2 ] || SECONDS=$((SECONDS + 1))
}
"""
"""Bash code with a clock that starts when two nodes have joined. Each `sleep` then counts as a second."""


def submit(
    folder: Path, environment: dict[str, str], *arguments: str, impatient: bool = False
) -> subprocess.Popen[str]:
    """Start the script as Slurm does on the first node. An `impatient` script waits for nodes for only 2 seconds of
    `CLOCK`.
    """
    text = SCRIPT.read_text()
    assert "patience=300 " in text
    assert "pause=10 " in text
    text = text.replace("pause=10 ", "pause=0 ")
    (folder / "script").write_text(text.replace("patience=300 ", f"{CLOCK}patience=2 ") if impatient else text)
    words = ["bash", str(folder / "script"), *arguments]
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def left(folder: Path) -> list[str]:
    """Return the command lines of processes that still run in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_slurm_job_starts_ray_and_returns_run_status(tmp_path: Path, environment: dict[str, str]) -> None:
    job = submit(tmp_path, environment, "my_experiment", "max_steps=2")
    _, said = job.communicate(timeout=limits.PROCESS)
    assert job.returncode == 7, said
    common = "start --block --disable-usage-stats --num-gpus=4"
    head, *others = (tmp_path / "started").read_text().splitlines()
    assert head == f"one: {common} --head --include-dashboard=false --node-ip-address=10.0.0.1 --port=6387 token given"
    assert sorted(others) == [f"{node}: {common} --address=10.0.0.1:6387 token given" for node in ("three", "two")]
    ran = "10.0.0.1:6387 -m roll.pipeline --config-name my_experiment num_gpus_per_node=4 max_steps=2\n"
    assert (tmp_path / "ran").read_text() == ran
    limits.until(lambda: not left(tmp_path), "the processes of the job have ended", limits.END, lambda: left(tmp_path))


def test_run_checkpoints_before_the_time_limit(tmp_path: Path, environment: dict[str, str]) -> None:
    job = submit(tmp_path, environment | {"long": "1"}, "my_experiment")
    limits.until((tmp_path / "ran").exists, "the run has started")
    job.terminate()
    _, said = job.communicate(timeout=limits.PROCESS)
    assert job.returncode == 130, said
    assert (tmp_path / "ran").read_text().endswith("checkpoint\n")
    limits.until(lambda: not left(tmp_path), "the processes of the job have ended", limits.END, lambda: left(tmp_path))


@pytest.mark.parametrize(("restarts", "status", "runs"), [("2", 7, 3), ("1", 137, 2), ("0", 137, 1)])
def test_killed_driver_is_restarted_up_to_given_limit(
    restarts: str, status: int, runs: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The driver is killed in its first two runs. A third run exits with status 7, and the driver is not started
    again.
    """
    job = submit(tmp_path, environment | {"dies": "2"}, "--restarts", restarts, "my_experiment", "max_steps=2")
    _, said = job.communicate(timeout=limits.PROCESS)
    assert job.returncode == status, said
    ran = "10.0.0.1:6387 -m roll.pipeline --config-name my_experiment num_gpus_per_node=4 max_steps=2\n"
    assert (tmp_path / "ran").read_text() == runs * ran
    assert said.count("status 137; it is started") == runs - 1
    limits.until(lambda: not left(tmp_path), "the processes of the job have ended", limits.END, lambda: left(tmp_path))


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"fails": "one"}, "no such device\nroll: Ray did not start on one; see its output above"),
        ({"fails": "three"}, "no such device\nroll: Ray did not start on three; see its output above"),
        ({"lost": "two"}, "roll: 2 of 3 nodes have joined the cluster at 10.0.0.1:6387 after 2 s"),
    ],
)
def test_missing_node_ends_the_job(
    trouble: dict[str, str], said: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    job = submit(tmp_path, environment | trouble, "my_experiment", impatient=bool(trouble.get("lost")))
    _, errors = job.communicate(timeout=limits.PROCESS)
    assert job.returncode == 1
    assert said in errors
    assert not (tmp_path / "ran").exists()
    limits.until(lambda: not left(tmp_path), "the processes of the job have ended", limits.END, lambda: left(tmp_path))


def test_what_slurm_lacks_is_said(tmp_path: Path, environment: dict[str, str]) -> None:
    job = submit(tmp_path, environment)
    assert (
        "usage: sbatch rlvr.sbatch [--restarts N] EXPERIMENT" in job.communicate(timeout=limits.PROCESS)[1]
        and job.returncode
    )
    job = submit(tmp_path, environment | {"PATH": "/usr/bin:/bin"}, "x")
    assert "scontrol: command not found" in job.communicate(timeout=limits.PROCESS)[1] and job.returncode == 127
