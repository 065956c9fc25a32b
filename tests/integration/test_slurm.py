"""The Slurm script with real Ray, on two nodes that are two addresses of this machine. Only Slurm's programs are
replaced.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray.util

from tests import limits
from tests.integration.conftest import ROOT, World
from tests.integration.test_two_nodes import RAY, SECOND, free_port, ranks

pytestmark = [pytest.mark.engines, pytest.mark.full]

PROGRAMS = {
    "scontrol": 'printf "one\\ntwo\\n"',
    "hostname": f"echo {ray.util.get_node_ip_address()}",
    "srun": f'while [ "${{1#-}}" != "$1" ]; do shift; done; exec "$@" --node-ip-address={SECOND}',
    "ray": f'if [ "$1" = start ]; then set -- "$@" --num-cpus=1 --object-store-memory=100000000; fi; exec {RAY} "$@"',
}


@pytest.fixture
def job() -> Iterator[dict[str, str]]:
    """Yield the environment of a job on two nodes without GPUs. Ray's files are in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="job-", dir="/tmp"))  # short, because the paths of sockets in it are limited
    programs = folder / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    port = free_port()
    try:
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        slurm = {"SLURM_JOB_NODELIST": "[one,two]", "SLURM_JOB_ID": str(port), "SLURM_GPUS_ON_NODE": "1"}
        yield os.environ | slurm | {"PATH": path, "RAY_TMPDIR": str(folder), "SPT_NOENV": "1"}
    finally:
        shutil.rmtree(folder)


def test_slurm_job_trains_and_cleans_its_nodes(
    world: World, job: dict[str, str], leaves_nothing: Callable[[], None]
) -> None:
    words = [
        "bash",
        str(ROOT / "examples" / "slurm" / "rlvr.sbatch"),
        "tiny/tiny_warm_up",
        "output_dir=job",
        "max_steps=1000",
    ]
    process = subprocess.Popen(
        words,
        cwd=world.folder,
        env=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        world.wait_for_step("job", 1, process)
        assert len({rank.ppid() for rank in ranks()}) == 2, "each node's raylet started one"
    finally:
        process.terminate()  # as Slurm does ten minutes before the time limit
        output, _ = process.communicate(timeout=limits.RUN)
    assert process.returncode == 130, output
    last = world.metrics("job")[-1]["step"]
    assert (world.folder / "job" / "checkpoints" / f"step_{last}").is_dir(), output
    leaves_nothing()
