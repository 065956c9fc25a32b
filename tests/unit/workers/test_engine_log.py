"""The exception that ended vLLM's engine process, found in logs of real deaths."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from roll.ray.process import LONGEST_CAUSE, root_cause

CORE = "(EngineCore pid=9797) ERROR 11-25 11:19:03 [core.py:1512] "
TRACEBACK = (
    f'{CORE}Traceback (most recent call last):\n{CORE}  File "core.py", line 1496, in '
    f"run_engine_core\n{CORE}    raise RuntimeError(\n"
)
KERNEL = "Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"
PASSED_ON = (
    f"{CORE}RuntimeError: Worker failed with error '{KERNEL}', please check the stack trace above for the root cause\n"
)
DEAD = (
    "(MainProcess pid=9258) ERROR 11-25 11:19:03 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: "
    "EngineCore had an issue.\n"
)
FATAL = f"{CORE}EngineCore encountered a fatal error.\n{TRACEBACK}"
START = FATAL.replace("encountered a fatal error", "failed to start")


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        (FATAL + PASSED_ON + DEAD, f"RuntimeError: {KERNEL}"),
        (
            START + f"{CORE}ValueError: Type fp16 is not supported on your device.\n" + DEAD,
            "ValueError: Type fp16 is not supported on your device.",
        ),
        (FATAL + f"{CORE}torch.OutOfMemoryError: CUDA out of memory.\n", "torch.OutOfMemoryError: CUDA out of memory."),
        (FATAL + f"{CORE}KeyError: 'a'\n\n{CORE}During handling:\n{CORE}RuntimeError: b\n", "KeyError: 'a'"),
        (FATAL.replace(CORE, "") + "AssertionError\n", "AssertionError"),
        (f"{CORE}ValueError: harmless\n{FATAL}{CORE}ValueError: fatal\n", "ValueError: fatal"),
        (FATAL + f"{CORE}ValueError: {'x' * 900}\n", f"ValueError: {'x' * 900}"[:LONGEST_CAUSE]),
        (f"{CORE}ValueError: of a request\n{DEAD}", None),
        ("*** SIGILL received at time=1764 on cpu 1 ***\nPC: @ 0x7f\n", "*** SIGILL received"),
        (f"{START}Fatal Python error: Illegal instruction\n\nStack:\n", "Fatal Python error: Illegal instruction"),
        ("*** SIGTERM received at time=1764 on cpu 1 ***\n", None),
        (FATAL, None),
        ("", None),
    ],
)
def test_first_exception_after_fatal_error_is_cause(printed: str, cause: str | None) -> None:
    assert root_cause(printed) == cause


def test_vllm_writes_what_is_looked_for() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    core = (Path(spec.origin).parent / "v1/engine/core.py").read_text()
    assert "EngineCore encountered a fatal error." in core and "EngineCore failed to start." in core
    executor = (Path(spec.origin).parent / "v1/executor/multiproc_executor.py").read_text()
    assert "Worker failed with error '" in executor and "', please check the" in executor
