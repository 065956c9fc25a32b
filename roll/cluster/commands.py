"""From hosts to the commands that make a Ray cluster of them. Pure functions."""

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
        """The words of a local process that runs it there."""
        return [*SSH, self.host, shlex.join(self.words)]

    def __str__(self) -> str:
        return shlex.join(self.over_ssh)


def address(host: Host) -> str:
    """A host's name without the user that `ssh` takes."""
    return host.name.rpartition("@")[2]


def start_commands(hosts: Sequence[Host], port: int, ray: PurePosixPath) -> list[Command]:
    """Start the head, then every other node; in this order.

    Args:
        ray: Ray's program on every host; the environment is the same on all.
    """
    head, *others = hosts
    start = (*ENVIRONMENT, str(ray), "start", "--disable-usage-stats")
    return [
        Command(head.name, (*start, "--head", f"--port={port}", f"--num-gpus={head.gpus}")),
        *(Command(host.name, (*start, f"--address={address(head)}:{port}", f"--num-gpus={host.gpus}")) for host in others),
    ]


def stop_commands(hosts: Sequence[Host], ray: PurePosixPath) -> list[Command]:
    """Stop every node, the head last."""
    return [Command(host.name, (str(ray), "stop", "--grace-period=30")) for host in reversed(hosts)]


def join_words(hosts: Sequence[Host], port: int) -> str:
    """What a shell sets before a run so that it joins the cluster."""
    return f"RAY_AUTH_MODE=token RAY_ADDRESS={address(hosts[0])}:{port}"
