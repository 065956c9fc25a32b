"""Builds the commands that start and stop a Ray cluster. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from roll.cluster.hostfile import Host

ENVIRONMENT = ("env", "RAY_AUTH_MODE=token", "RAY_worker_niceness=0")
"""Variables for Ray. The cluster can be reached by others, so it requires a token, which is in the same file on every
host. The niceness keeps workers and their engines from running at a lower priority than other processes, as they would
by default.
"""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@dataclass(frozen=True)
class Command:
    """One command on one host."""

    host: str
    words: tuple[str, ...]

    @property
    def over_ssh(self) -> list[str]:
        """Words of the local command that runs this command on its host."""
        return [*SSH, self.host, shlex.join(self.words)]

    def __str__(self) -> str:
        return shlex.join(self.over_ssh)


def address(head: Host, port: int) -> str:
    """Return the address at which the cluster can be joined."""
    return f"[{head.address}]:{port}" if ":" in head.address else f"{head.address}:{port}"


def start_commands(hosts: Sequence[Host], port: int, ray: PurePosixPath) -> list[Command]:
    """Return the commands that start the head and then every other node.

    Args:
        ray: path of the program `ray`, which is the same on every host.
    """
    head, *others = hosts
    return [
        _start(head, ray, "--head", f"--port={port}"),
        *(_start(host, ray, f"--address={address(head, port)}") for host in others),
    ]


def _start(host: Host, ray: PurePosixPath, *place: str) -> Command:
    seen = () if host.slots is None else (f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.slots))}",)
    return Command(
        host.name, (*ENVIRONMENT, *seen, str(ray), "start", "--disable-usage-stats", *place, f"--num-gpus={host.gpus}")
    )


def stop_commands(hosts: Sequence[Host], ray: PurePosixPath) -> list[Command]:
    """Return the commands that stop every node, the head last."""
    return [Command(host.name, (str(ray), "stop", "--grace-period=30")) for host in reversed(hosts)]


def join_words(hosts: Sequence[Host], port: int) -> str:
    """Return the environment variables with which a run joins the cluster, as words of a shell command."""
    return f"RAY_AUTH_MODE=token RAY_ADDRESS={address(hosts[0], port)}"
