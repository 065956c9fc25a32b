"""The sockets of a run are those of the table in SECURITY.md."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests import limits
from tests.integration.conftest import ROOT, SMALL, TINY, World

pytestmark = [pytest.mark.engines, pytest.mark.full]


def allowed() -> dict[str, set[str]]:
    """Return, by a part of a process's command, the addresses at which the table lets it listen."""
    found: dict[str, set[str]] = {}
    for row in re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+) \|", (ROOT / "SECURITY.md").read_text(), re.MULTILINE):
        processes, address = re.findall("`([^`]+)`", row[0]), re.match(r"127\.0\.0\.1", row[1])
        for process in processes:
            found.setdefault(process, set()).update([address[0]] if address else [])
    return found


def sockets(parent: int) -> Iterator[tuple[str, str]]:
    """Yield the command and the address of each socket of a process and its descendants that takes connections."""
    with suppress(psutil.Error):
        for process in [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]:
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                for each in process.net_connections("inet"):
                    if each.status == psutil.CONN_LISTEN:
                        yield command, each.laddr.ip.removeprefix("::ffff:")


@pytest.fixture
def world(tmp_path: Path) -> World:
    for script, name in (("make_model.py", "model"), ("make_problems.py", "problems")):
        subprocess.run([sys.executable, TINY / script, f"output/tiny/{name}"], cwd=tmp_path, check=True)
    return World(tmp_path)


def test_a_run_listens_as_the_table_says(world: World) -> None:
    table, found = allowed(), set[tuple[str, str]]()
    words = ("--config-name", "tiny/tiny_rlvr_lora_zero3", "pretrain=output/tiny/model", "max_steps=2", *SMALL)
    run = world.start(*[word for word in words if "validation" not in word])
    with (world.folder / "said").open("w") as said:
        assert run.stdout is not None
        copying = subprocess.Popen(["cat"], stdin=run.stdout, stdout=said)

        def is_over() -> bool:
            found.update(sockets(run.pid))
            return run.poll() is not None

        limits.until(is_over, "the run ends", limits.RUN)
    copying.wait(limits.CALL)
    assert run.wait(limits.CALL) == 0, (world.folder / "said").read_text()
    assert any("ray::" in command for command, _ in found) and any("raylet" in command for command, _ in found)
    others = {
        (command, address)
        for command, address in found
        if not any(part in command and address in addresses for part, addresses in table.items())
    }
    assert not others, others
