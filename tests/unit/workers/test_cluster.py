"""The cluster: cleanup after an interrupted start, and the watch over Ray's head processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray

from roll.errors import WorkerFailed
from roll.ray import cluster
from tests import limits

HEAD = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid, flush=True)
time.sleep(3600)
"""


@contextmanager
def asleep() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that sleeps, and kill it at the end."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as process:
        try:
            yield process
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    """Return whether the process runs. A killed orphan remains as a zombie until it is reaped, and does not count as
    running.
    """
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("cut_off", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(), cluster.ClusterUnavailable),
    ],
)
def test_a_start_that_is_cut_off_leaves_nothing(
    cut_off: BaseException, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its start is interrupted, Ray forgets the processes that it has already started."""
    pids: list[int] = []

    def init(**_: object) -> None:
        head = subprocess.Popen([sys.executable, "-c", HEAD], stdout=subprocess.PIPE, text=True)
        assert head.stdout is not None
        pids.extend([head.pid, int(head.stdout.readline())])
        raise cut_off

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "GRACE", 0.5)
    monkeypatch.setattr(cluster, "temporary", lambda: tmp_path)
    with pytest.raises(raised), cluster.cluster(tmp_path / "run", 0, 8):
        raise AssertionError("a cluster that did not start")
    assert len(pids) == 2
    limits.until(lambda: not any(map(is_running, pids)), "all started processes are gone", limits.END)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_ray_leaves_the_handler_of_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray installs handlers of its own when it starts, and the default action when it shuts down."""
    taken: list[int] = []
    kill = cluster.Leftovers.kill

    def signalled(leftovers: cluster.Leftovers, seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        kill(leftovers, seconds)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.Leftovers, "kill", signalled)
    before = signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
    try:
        with cluster.cluster(tmp_path, gpus=0, gpus_per_node=8):
            os.kill(os.getpid(), signal.SIGTERM)
            assert taken == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert taken == [signal.SIGTERM] * 2


ALWAYS_SIGNALLED = """
import os, signal, sys, threading
from pathlib import Path
from roll.ray import cluster
taken, ended = [], threading.Event()
def send():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while not ended.wait(0.002):
        os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
sending = threading.Thread(target=send)
sending.start()
with cluster.cluster(Path(sys.argv[1]), gpus=0, gpus_per_node=8):
    pass
ended.set()
sending.join()
print(len(taken))
"""


def test_signals_at_any_time_reach_the_own_handler(tmp_path: Path) -> None:
    done = script(ALWAYS_SIGNALLED, tmp_path)
    output, _ = done.communicate(timeout=limits.PROCESS)
    assert done.returncode == 0 and int(output) > 100


def script(code: str, folder: Path) -> subprocess.Popen[str]:
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)


def test_a_signal_to_all_processes_ends_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    others = set(psutil.Process().children(recursive=True))
    with cluster.cluster(tmp_path, gpus=0, gpus_per_node=8):
        own_pid = ray.remote(lambda: os.getpid())
        pid = ray.get(own_pid.remote(), timeout=limits.CALL)
        started = set(psutil.Process().children(recursive=True)) - others
        for number in (signal.SIGTERM, signal.SIGHUP):
            for process in started:
                process.send_signal(number)
        assert ray.get(own_pid.remote(), timeout=limits.CALL)
        assert pid in {process.pid for process in started} and all(is_running(process.pid) for process in started)
    limits.until(lambda: not any(is_running(process.pid) for process in started), "all have ended", limits.END)


HOLDS = """
import os, sys, time
from pathlib import Path
import psutil
from roll.ray import cluster
with cluster.cluster(Path(sys.argv[1]), gpus=0, gpus_per_node=8):
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    time.sleep(3600)
"""


def test_a_killed_driver_leaves_no_process(tmp_path: Path) -> None:
    with script(HOLDS, tmp_path) as driver:
        assert driver.stdout is not None
        started = list(map(int, driver.stdout.readline().split()))
        driver.kill()
    assert len(started) > 4
    limits.until(lambda: not any(map(is_running, started)), "all processes have ended", limits.END)


def test_death_of_head_ends_work_as_cause(tmp_path: Path) -> None:
    """Ray alone would end this process without cleanup, a minute after the death of the GCS."""
    with asleep() as head:
        session = cluster.ClusterSession(tmp_path, tmp_path, tmp_path, [psutil.Process(head.pid)])
        reached: list[str] = []

        async def work() -> None:
            async with session.watched():
                await asyncio.sleep(0.01)
            reached.append("the end")
            async with session.watched():
                head.kill()
                await asyncio.sleep(limits.CALL)
                reached.append("never")

        with pytest.raises(cluster.ClusterUnavailable, match="Ray: its process .* died"):
            asyncio.run(work())
    assert reached == ["the end"]


def test_stopped_head_ends_work_despite_blocked_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to a stopped GCS returns only when the GCS is killed."""
    monkeypatch.setattr(cluster, "LOOK_EVERY", limits.LOOK)
    with asleep() as process:
        session = cluster.ClusterSession(tmp_path, tmp_path, tmp_path, [psutil.Process(process.pid)])

        async def work() -> None:
            async with session.watched():
                await asyncio.sleep(0)  # the watch begins
                process.send_signal(signal.SIGSTOP)
                process.wait(limits.END)  # block the event loop, as a call to the stopped GCS would
                await asyncio.sleep(limits.CALL)

        with pytest.raises(cluster.ClusterUnavailable, match=r"Ray: its process .* stopped \(SIGSTOP\)"):
            asyncio.run(work())


def test_head_that_continues_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only consecutive checks count. Here, the check finds the process running once between two series of the tolerated
    length.
    """
    most = cluster.LOOKS_STOPPED - 1
    looks = iter([True] * most + [False] + [True] * most)
    seen = threading.Event()

    def is_stopped(_: psutil.Process) -> bool:
        stopped = next(looks, None)
        if stopped is None:
            seen.set()
        return bool(stopped)

    monkeypatch.setattr(cluster, "LOOK_EVERY", limits.LOOK)
    monkeypatch.setattr(cluster, "is_stopped", is_stopped)
    with asleep() as process:
        session = cluster.ClusterSession(tmp_path, tmp_path, tmp_path, [psutil.Process(process.pid)])

        async def work() -> bool:
            async with session.watched():
                return await asyncio.to_thread(seen.wait, limits.END)

        assert asyncio.run(work())
        assert process.poll() is None


def test_unreached_head_of_joined_cluster_ends_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOK_EVERY", limits.LOOK)
    monkeypatch.setattr(cluster, "HEAD_SECONDS", 10 * limits.LOOK)
    door = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{door.getsockname()[1]}"
    session = cluster.ClusterSession(tmp_path, tmp_path, tmp_path, joined=address)

    async def work() -> None:
        async with session.watched():
            await asyncio.to_thread(lambda: [door.accept() for _ in range(20)])
            door.close()
            await asyncio.sleep(limits.CALL)

    with pytest.raises(cluster.ClusterUnavailable, match=f"RAY_ADDRESS: .*{address}"):
        asyncio.run(work())
    assert session.is_lost.is_set()


def test_failure_under_watch_keeps_its_cause(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster.ClusterSession(tmp_path, tmp_path, tmp_path).watched():
            raise WorkerFailed("reference", 0, "the process died") from OSError("first")

    with pytest.raises(WorkerFailed) as failed:
        asyncio.run(work())
    assert str(failed.value.__cause__) == "first"
