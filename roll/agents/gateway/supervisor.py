"""Runs one command: `python -m roll.agents.gateway.supervisor DESCRIPTOR MEMORY_BYTES PROCESSES COMMAND...`. agent.py
starts and ends it.

The command runs in a new session (setsid). It and all its descendants, in any process group, are killed when the
command ends or stays stopped, when they exceed a limit, or when the other end of the descriptor is closed, which also
happens when the run dies.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

from roll.system.orphans import adopt_orphans, end_descendants, is_stopped
from roll.system.tree import LOOK_EVERY, STOPPED_LOOKS, TreeBounds, tree

EXCEEDED = 125
"""Exit status of a command that exceeded a limit."""
NOT_FOUND = 127
"""Exit status of a command that cannot be started, as in shells."""
BY_SIGNAL = 128
"""Base of the exit status of a command that a signal ended; the signal's number is added."""
STOPPED = BY_SIGNAL + signal.SIGSTOP
"""Exit status of a command that was killed because it was stopped."""


def main(descriptor: int, bounds: TreeBounds, command: Sequence[str]) -> int:
    """Run the command. Return its exit status."""
    adopt_orphans()
    try:
        process = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr)
        return NOT_FOUND
    why, ended = _watched(process.pid, descriptor, bounds)
    end_descendants()
    status = process.wait()
    if why:
        print(why, file=sys.stderr)
        return ended
    return status if status >= 0 else BY_SIGNAL - status


def _watched(pid: int, descriptor: int, bounds: TreeBounds) -> tuple[str, int]:
    """Wait until the command ends or the descriptor is closed.

    Return why the command must be killed before, with its exit status; "" if it need not.
    """
    ended, stopped = os.pidfd_open(pid), 0
    while not select.select([ended, descriptor], [], [], LOOK_EVERY)[0]:
        stopped = stopped + 1 if is_stopped(pid) else 0
        if stopped == STOPPED_LOOKS:
            return f"its process {pid} was stopped (SIGSTOP)", STOPPED
        # Orphans become children of this process, so the tree includes them.
        if exceeded := bounds.exceeded(tree(os.getpid())[1:]):
            return exceeded, EXCEEDED
    return "", 0


if __name__ == "__main__":
    descriptor, memory_bytes, processes = map(int, sys.argv[1:4])
    sys.exit(main(descriptor, TreeBounds(memory_bytes, processes), sys.argv[4:]))
