"""Examples that only a cluster can run are well-formed: the Slurm script, the Kubernetes manifest, and the plans of 72B
models.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from roll.pipeline import main
from tests import limits

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SLURM = EXAMPLES / "slurm" / "rlvr.sbatch"
MANIFEST = yaml.safe_load((EXAMPLES / "kubernetes" / "rayjob.yaml").read_text())


def test_slurm_script_is_bash_with_documented_resources() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True, timeout=limits.PROCESS)
    text = SLURM.read_text()
    for line in ("--nodes=2", "--gpus-per-node=8", "--signal=B:TERM@600", "--exclusive"):
        assert f"#SBATCH {line}\n" in text


def test_shellcheck_finds_nothing_in_the_slurm_script() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", "--shell=bash", str(SLURM)], capture_output=True, text=True, timeout=limits.PROCESS, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_manifest_is_a_rayjob_of_two_nodes() -> None:
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("ray.io/v1", "RayJob")
    cluster = MANIFEST["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 1
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == group["rayStartParams"]["num-gpus"] == "8"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared": "/shared", "memory": "/dev/shm"} and {
            volume["name"] for volume in pod["volumes"]
        } == set(mounts)


def test_the_manifests_fields_are_those_of_kuberays_types() -> None:
    """Kubernetes drops unknown fields, or refuses the manifest. Names: as in KubeRay 1.6's `rayjob_types.go` and
    `raycluster_types.go`.
    """
    job = {
        "entrypoint",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "backoffLimit",
        "rayClusterSpec",
        "submissionMode",
    }
    group = {"rayStartParams", "template"}
    spec = MANIFEST["spec"]
    cluster = spec["rayClusterSpec"]
    assert set(spec) <= job
    assert set(cluster) <= {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert set(cluster["headGroupSpec"]) == group
    assert all(
        set(workers) <= group | {"groupName", "replicas", "minReplicas", "maxReplicas"}
        for workers in cluster["workerGroupSpecs"]
    )
    starts = [one["rayStartParams"] for one in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert all(isinstance(value, str) for start in starts for value in start.values()), (
        "rayStartParams is a map of strings"
    )


def test_the_manifests_ray_is_the_locks() -> None:
    locked = (EXAMPLES.parent / "requirements" / "gpu.lock").read_text().splitlines()
    assert f"ray=={MANIFEST['spec']['rayClusterSpec']['rayVersion']}" in locked


def test_the_manifests_entry_point_plans(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(MANIFEST["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "roll.pipeline"]
    assert main([*words[3:], "dry_run=true"]) == 0
    assert "Nodes: 2 of 8 devices" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "nodes"), [("rlvr_72b_lora_zero3_2nodes", 2), ("rlvr_72b_zero3_4nodes", 4)])
def test_the_plan_of_72b_says_that_it_fits(name: str, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", name, "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    assert f"Nodes: {nodes} of 8 devices" in printed
    assert "It fits into" in printed and "GPUs of 79 GiB" in printed and "too much" not in printed
    assert main(["--config-name", name, "dry_run=true", "gpu_memory_gib=15"]) == 0
    printed = capsys.readouterr().out
    assert "warning: too much" in printed and "GPUs of 15 GiB" in printed and "It fits into" not in printed
    assert all(f"{work} on device 0, " in printed for work in ("generation", "training")) and "weight sync" in printed
