"""A reward that fails in many ways. A test copies this file to a temporary folder, where the reward creates marker
files.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from roll.rewards.answers import ground_truth
from roll.types import Prompt, RewardOutcome, RewardResult

FOREVER = 3600
RESULTS = {
    "nan": RewardResult(float("nan")),
    "inf part": RewardResult(1.0, parts={"style": float("inf")}),
    "garbage": [1.0],
    "nan number": float("nan"),
    "unavailable": RewardResult(7.0, RewardOutcome.UNAVAILABLE, note="no sandbox here"),
    "malformed": RewardResult("high"),  # type: ignore[arg-type]
    "unparsable": RewardResult(7.0, RewardOutcome.UNPARSABLE, note="nothing there"),
}


def mark(name: str) -> Path:
    """Return the path of a marker file in the test's folder."""
    return Path(__file__).with_name(name)


def say_that_it_hangs() -> None:
    """Create the marker file `hanging`, which contains the PID of this process."""
    (unfinished := mark("unfinished")).write_text(str(os.getpid()))
    unfinished.rename(mark("hanging"))


def hang() -> None:
    say_that_it_hangs()
    time.sleep(FOREVER)


def fail(response: str) -> None:
    """Raise the exception that the response names, if it names one."""
    if response == "sys.exit":
        sys.exit("enough")
    if response == "raise":
        raise KeyError("no such thing")
    if response == "raise with a note":
        error = KeyError("no such thing")
        error.add_note("a remark")
        raise error  # raise with a note
    if response == "raise far away":
        ground_truth({})
    if response == "syntax":
        compile("1 +", "here", "eval")


def act(prompt: Prompt, response: str, row: Any, bonus: float = 0.0) -> Any:
    """Do what the response names. Reward any other response with a value that depends on its length."""
    if response == "hang":
        hang()
    if response == "swallow":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            with suppress(BaseException):
                hang()
    if response == "hang in C":
        say_that_it_hangs()
        ctypes.PyDLL(None).sleep(FOREVER)  # keeps the GIL, so no Python code runs meanwhile
    if response == "exit":
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    fail(response)
    if response in RESULTS:
        return RESULTS[response]
    if response == "print":
        print("x" * 100000)
        sys.stdout.flush()
    if response == "spawn and hang":
        subprocess.Popen(["sleep", str(FOREVER)])
        hang()
    if response == "spawn and exit":
        subprocess.Popen(["sleep", str(FOREVER)])
        os._exit(3)
    if response.startswith("apart"):
        # Start a new session. Its leader ends at once and leaves an orphan.
        subprocess.run(["setsid", "sh", "-c", f"sleep {FOREVER} & echo $! > {row['file']}"])
        if response == "apart and hang":
            hang()
        return RewardResult(1.0)
    if response == "fork":
        if not os.fork():
            sys.exit(0)  # meant to end only the forked process
        os.wait()
    if response == "take":
        return RewardResult(row["left"].pop() + prompt.row.pop("base"))  # type: ignore[attr-defined]
    if response.startswith("wait"):
        mark(f"begun {response}").touch()
        while not mark(f"end of {response}").exists():
            time.sleep(0.01)
    if response == "modules":
        return RewardResult(float("torch" in sys.modules) + 2 * float("ray" in sys.modules))
    if response == "environment":
        return RewardResult(float(os.environ["REWARD_LEVEL"]))
    return RewardResult(row["base"] + len(response) + bonus, parts={"length": float(len(response))}, note=response[:10])
