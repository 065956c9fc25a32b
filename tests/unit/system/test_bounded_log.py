"""A log beyond its bound is copied to another file and emptied."""

from __future__ import annotations

import os
from pathlib import Path

from roll.hosted.worker import bound_log


def test_log_beyond_its_bound_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "rewards.maths-0.log"
    with log.open("ab", buffering=0) as own, log.open("ab", buffering=0) as other:
        own.write(b"x" * 100)
        assert not bound_log(own.fileno(), 100)
        other.write(b"y")
        assert bound_log(own.fileno(), 100)
        other.write(b"later\n")
    assert (tmp_path / "rewards.maths-0.log.1").read_bytes() == b"x" * 100 + b"y"
    said, later = log.read_text().splitlines()
    assert said.startswith("[") and said.endswith(" rewards.maths-0.log.1]")
    assert "100 bytes; " in said and "previous 101 bytes" in said
    assert later == "later"


def test_what_is_no_file_is_left_alone() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"x" * 100)
        assert not bound_log(write, 10)
        assert os.read(read, 200) == b"x" * 100
    finally:
        os.close(read)
        os.close(write)
