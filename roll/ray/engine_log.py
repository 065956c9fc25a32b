"""Finds the exception that ended vLLM's engine process. vLLM writes it to the log and passes on only that the process
has died.
"""

from __future__ import annotations

import re

# From vllm/v1/engine/core.py, where the traceback follows.
FATAL = re.compile(r"EngineCore (?:encountered a fatal error|failed to start)\.")
PREFIX = re.compile(r"^(?:\([^()]*pid=\d+\) )?(?:[A-Z]+ \S+ \S+ \[\S+\] )?")
"""What vLLM writes before each line of a log: the name of its process, then level, date, time and place."""
EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*$")
"""The last line of a traceback."""
# From vllm/v1/executor/multiproc_executor.py.
PASSED_ON = re.compile(
    r"Worker failed with error '(?P<said>.*)', please check the stack trace above for the root cause$"
)
LONGEST_CAUSE = 500
"""Largest number of characters of a cause in a message. The log has the complete text."""


def root_cause(printed: str) -> str | None:
    """Return the exception that ended vLLM's engine process, from what the process printed; None if it printed none.

    It is the first one after the report of a fatal error. In a chain of exceptions, the first one is the cause of the
    others.
    """
    report = FATAL.search(printed)
    lines = (PREFIX.sub("", line) for line in printed[report.end() :].splitlines()) if report else ()
    found = next((line.strip() for line in lines if EXCEPTION.match(line)), None)
    return found and PASSED_ON.sub(lambda worker: worker["said"], found)[:LONGEST_CAUSE]
