"""The processes of a tree, and their resident memory."""

from __future__ import annotations

import os
import subprocess
import sys

from roll.system.tree import resident_bytes, tree
from tests import limits

MIB = 1 << 20
HOLDER = f"held = bytearray(b'x') * {64 * MIB}; print(flush=True); input()"


def test_process_tree_and_its_resident_memory() -> None:
    shell = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, HOLDER]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin and parent.stdout
        parent.stdout.readline()
        limits.until(lambda: len(tree(parent.pid)) == 2, "the tree has two processes")
        own, child = tree(parent.pid)
        assert own == parent.pid
        assert 64 * MIB < resident_bytes([child]) < 128 * MIB
        assert resident_bytes([own, child]) == resident_bytes([own]) + resident_bytes([child])
        assert parent.pid in tree(os.getpid())
        parent.stdin.close()
    assert resident_bytes([parent.pid]) == 0
