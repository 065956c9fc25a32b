"""Two Ray nodes on this machine, each with its own address: a run trains on both, and is then resumed on one node."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray.util

from tests import limits
from tests.integration.conftest import World

pytestmark = [pytest.mark.engines, pytest.mark.full]

RAY = str(Path(sys.executable).with_name("ray"))
SECOND = "127.0.0.2"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[dict[str, str]]:
    """Start two Ray nodes on this host, and return the environment variables with which a process joins them."""
    # A short name, because the paths of the sockets in this folder have a maximum length.
    folder = Path(tempfile.mkdtemp(prefix="two-", dir="/tmp"))
    port, dashboard = free_port(), free_port()
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    secret["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where a job finds `python`
    secret["SPT_NOENV"] = (
        "1"  # otherwise, setting a process title would overwrite the environment that other processes read
    )
    common = [RAY, "start", "--disable-usage-stats", "--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000"]
    before = set(psutil.process_iter())
    try:
        head = [*common, "--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}"]
        address = f"{ray.util.get_node_ip_address()}:{port}"
        # With a common folder, the second node would replace the files of a job in which the job runs.
        second = [*common, f"--address={address}", f"--node-ip-address={SECOND}", f"--temp-dir={folder / '2'}"]
        for words, own in ((head, {"TMPDIR": str(folder)}), (second, {"RAY_worker_niceness": "0"})):
            done = subprocess.run(
                words, env=os.environ | secret | own, capture_output=True, text=True, timeout=limits.START, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        yield secret | {"RAY_ADDRESS": address, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    finally:
        ours = [
            process
            for process in psutil.process_iter()
            if process not in before and str(folder) in " ".join(command(process))
        ]
        for process in ours:
            process.terminate()
        _, left = psutil.wait_procs(ours, timeout=limits.END)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=limits.END)
        shutil.rmtree(folder, ignore_errors=True)


def command(process: psutil.Process) -> list[str]:
    """Return the command line of a process, or an empty list if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def ranks() -> list[psutil.Process]:
    """Return the worker processes of roles with blocking methods, but not the processes that they have forked."""
    found = [process for process in psutil.process_iter() if (command(process) or [""])[0].startswith("ray::Process")]
    return [process for process in found if process.ppid() not in {other.pid for other in found}]


def test_run_on_two_nodes_continues_on_one(world: World, two_nodes: dict[str, str]) -> None:
    (world.folder / ".deepspeed_env").write_text("ROLL_COLOUR=blue\n")
    arguments = ("--config-name", "tiny/tiny_warm_up", "output_dir=two", "sft_train.world_size=2", "save_steps=20")
    process = world.start(*arguments, "max_steps=60", environment=two_nodes)
    try:
        world.wait_for_step("two", 1, process)
        found = ranks()
        assert len(found) == 2
        assert len({one.ppid() for one in found}) == 2, "each node's raylet started one"
        assert [one.environ()["ROLL_COLOUR"] for one in found] == ["blue", "blue"]
    finally:
        outcome = world.wait(process)
        (world.folder / ".deepspeed_env").unlink()
    assert outcome.status == 0, outcome.output
    assert ranks() == []
    subprocess.run([RAY, "status"], env=os.environ | two_nodes, capture_output=True, timeout=limits.START, check=True)

    outcome = world.run(*arguments, "max_steps=64")
    assert outcome.status == 0, outcome.output
    lines = [line for line in world.metrics("two") if "sft/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 65))
    losses = [line["sft/loss"] for line in lines]
    assert losses[60] < losses[0] / 4, "the resumed run continues from the loss that was reached"
    assert (world.folder / "two" / "export" / "model.safetensors.index.json").exists()


def test_the_doctor_hears_of_both_nodes(two_nodes: dict[str, str]) -> None:
    words = [sys.executable, "-m", "roll.ray.survey"]
    done = subprocess.run(
        words, env=os.environ | two_nodes, capture_output=True, text=True, timeout=limits.START, check=True
    )
    by_address = {node["address"]: node for node in json.loads(done.stdout.splitlines()[-1])}
    assert len(by_address) == 2
    reached = {"interface": "lo", "unreached": []}
    assert by_address[SECOND] == {"address": SECOND, "gpus": 0, "niceness": 0} | reached
    del by_address[SECOND]
    assert [node["niceness"] for node in by_address.values()] == [15], "Ray's default niceness for workers"


def test_a_job_of_the_cluster_trains(world: World, two_nodes: dict[str, str]) -> None:
    job = world.folder / "job"
    shutil.copytree(world.folder / "output", job / "output")  # the whole folder is uploaded, so it must be small
    words = [
        RAY,
        "job",
        "submit",
        "--working-dir",
        ".",
        "--",
        "python",
        "-m",
        "roll.pipeline",
        "--config-name",
        "tiny/tiny_warm_up",
    ]
    own = (f"output_dir={world.folder / 'submitted'}", "max_steps=2")
    environment = os.environ | two_nodes
    done = subprocess.run(
        [*words, *own], cwd=job, env=environment, capture_output=True, text=True, timeout=limits.START, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in world.metrics("submitted")] == [1, 2]
    assert ranks() == []
