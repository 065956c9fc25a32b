"""Makes the commands that start a Ray cluster on hosts. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from roll.cluster.hostfile import Host

ENVIRONMENT = ("env", "RAY_AUTH_MODE=token", "RAY_worker_niceness=0")
"""A cluster that others can reach asks for a token, which lies in the same file on every host. Workers, and the engines that they
start, would by Ray's default give way to every other process of the host."""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclass(frozen=True)
class Command:
    """One command on one host."""

    host: str
    words: tuple[str, ...]

    @property
    def over_ssh(self) -> list[str]:
        """Return the words of a local process that runs the command on its host."""
        return [*SSH, self.host, shlex.join(self.words)]

    def __str__(self) -> str:
        return shlex.join(self.over_ssh)


def address(head: Host, port: int) -> str:
    """Address to join the cluster at."""
    return f"[{head.address}]:{port}" if ":" in head.address else f"{head.address}:{port}"


def start_commands(hosts: Sequence[Host], port: int, ray: PurePosixPath) -> list[Command]:
    """Return the commands that start the head and then every other node.

    Args:
        ray: Ray's program on every host; the environment is the same on all.
    """
    head, *others = hosts
    return [_start(head, ray, "--head", f"--port={port}"), *(_start(host, ray, f"--address={address(head, port)}") for host in others)]


def _start(host: Host, ray: PurePosixPath, *place: str) -> Command:
    seen = () if host.slots is None else (f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.slots))}",)
    return Command(host.name, (*ENVIRONMENT, *seen, str(ray), "start", "--disable-usage-stats", *place, f"--num-gpus={host.gpus}"))


def stop_commands(hosts: Sequence[Host], ray: PurePosixPath) -> list[Command]:
    """Return the commands that stop every node, the head last."""
    return [Command(host.name, (str(ray), "stop", "--grace-period=30")) for host in reversed(hosts)]


def join_words(hosts: Sequence[Host], port: int) -> str:
    """Return the variables for a run's shell, with which the run joins the cluster."""
    return f"RAY_AUTH_MODE=token RAY_ADDRESS={address(hosts[0], port)}"
