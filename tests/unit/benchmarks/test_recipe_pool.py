"""The order in which recipes are run on several GPUs, and what becomes of jobs that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recipe_pool import JOBS, Job, Pool, next_job


def names(*jobs: Job, free: int, ended: dict[str, int] | None = None, running: tuple[str, ...] = ()) -> str | None:
    found = next_job(jobs, ended or {}, running, free)
    return found and found.name


FIRST, SECOND, PAIR = Job("first", ("python -c pass",)), Job("second", ("",), ("first",)), Job("pair", ("",), (), 2)


def test_jobs_wait_for_those_that_they_need() -> None:
    assert names(FIRST, SECOND, free=1) == "first"
    assert names(FIRST, SECOND, free=1, running=("first",)) is None
    assert names(FIRST, SECOND, free=1, ended={"first": 0}) == "second"
    assert names(FIRST, SECOND, free=1, ended={"first": 1}) is None
    assert names(SECOND, free=1) == "second"  # its files are there


def test_a_job_for_two_keeps_free_gpus() -> None:
    assert names(PAIR, FIRST, free=1) is None
    assert names(PAIR, FIRST, free=2) == "pair"
    assert names(PAIR, FIRST, free=1, running=("pair",)) == "first"


def test_every_job_needs_only_earlier_ones() -> None:
    earlier = set[str]()
    for job in JOBS:
        assert earlier.issuperset(job.after)
        earlier.add(job.name)
    assert len(earlier) == len(JOBS)


def test_a_failed_command_ends_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = "python -c 'import os, sys; print(os.environ[sys.argv[1]], sys.argv[2])' CUDA_VISIBLE_DEVICES {devices}"
    jobs = (
        Job("two", ("python -c 'print(1)'", "python -c 'print(2)'")),
        Job("fails", ("python -c 'raise SystemExit(3)'", "python -c 'print(4)'")),
        Job("needs", (show,), ("fails",)),
        Job("last", (show,), ("two",), 2),
    )
    pool = Pool(jobs, 2, tmp_path)
    pool.run(60.0)
    assert pool.ended == {"two": 0, "fails": 3, "last": 0}
    assert (tmp_path / "two.log").read_text() == "1\n2\n"
    assert (tmp_path / "fails.log").read_text() == ""
    assert (tmp_path / "last.log").read_text() == "0,1 0,1\n"
    assert "fails ended with status 3" in capsys.readouterr().out


def test_jobs_are_interrupted_after_the_time(tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))"
    wait = f"import signal, sys, time; {handler}; time.sleep(60)"
    pool = Pool((Job("long", (f'python -I -S -c "{wait}"', "python -c pass")), FIRST), 1, tmp_path)
    pool.run(5.0)  # the interpreter must have set its handler by then, without the packages of its site
    assert pool.ended == {"long": 130}
