"""Replaces `ssh` and `srun` between the hosts of a lab. As a program, it is the client.

A host cannot enter another's namespaces, so a thread outside runs the command: it gets the words, the environment and
the caller's standard streams over a Unix socket on the caller's host, and answers with the exit status. If the caller
ends, the command gets SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hosts.lab import Host

SOCKET = "/tmp/remote"
LARGEST = 1 << 20
"""Largest request in bytes."""


def parse_ssh(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the host and the command of `ssh [-o OPTION] [USER@]HOST COMMAND`. ssh passes one text to a shell."""
    rest = list(words)
    while rest[0] == "-o":
        rest = rest[2:]
    return rest[0].rpartition("@")[2], ["bash", "-c", " ".join(rest[1:])]


def parse_srun(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the host and the command of `srun --OPTION=VALUE ... --nodelist=HOST COMMAND`."""
    options = [word for word in words if word.startswith("--")]
    first = next(number for number, word in enumerate(words) if not word.startswith("--"))
    node = next(word for word in options if word.startswith("--nodelist="))
    return node.partition("=")[2], list(words[first:])


PARSERS = {"ssh": parse_ssh, "srun": parse_srun}


def main() -> int:
    """Ask for a command on another host, and return its exit status."""
    program = sys.argv[1]
    host, command = PARSERS[program](sys.argv[2:])
    # srun passes on the job's environment, ssh does not.
    request = {"host": host, "command": command, "environment": dict(os.environ) if program == "srun" else {}}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(SOCKET)
        socket.send_fds(peer, [json.dumps(request).encode()], [0, 1, 2])
        answer = peer.recv(16)
    return int(answer) if answer else 255


class Daemon:
    """Runs the commands of all hosts' clients."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {name: host for host in hosts for name in (host.name, host.address, host.address6)}
        self._each = list(hosts)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A context in which every host has `ssh` and `srun`."""
        doors = []
        for host in self._each:
            for program in PARSERS:
                path = host.path(f"/tmp/bin/{program}")
                path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__)} {program} "$@"\n')
                path.chmod(0o755)
            door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            door.bind(str(host.path(SOCKET)))
            door.listen()
            doors.append(door)
            threading.Thread(target=self._accept, args=(door,), daemon=True).start()
        try:
            yield
        finally:
            for door in doors:
                door.close()

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                peer, _ = door.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            request, streams, _, _ = socket.recv_fds(peer, LARGEST, 3)
            try:
                status = self._run(peer, json.loads(request), streams)
            finally:
                for stream in streams:
                    os.close(stream)
            with suppress(OSError):
                peer.send(str(status).encode())

    def _run(self, peer: socket.socket, request: Mapping[str, object], streams: Sequence[int]) -> int:
        asked = json.loads(json.dumps(request))
        host = self._hosts.get(asked["host"])
        if host is None:
            os.write(streams[2], f"there is no host {asked['host']}\n".encode())
            return 255
        process = subprocess.Popen(
            host.words(asked["command"], asked["environment"]), stdin=streams[0], stdout=streams[1], stderr=streams[2]
        )
        threading.Thread(target=_end_with, args=(peer, process), daemon=True).start()
        return process.wait()


def _end_with(peer: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a command whose caller has gone."""
    with suppress(OSError):
        if peer.recv(1) or process.poll() is not None:
            return
    with suppress(OSError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
