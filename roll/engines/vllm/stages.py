"""Reports the stages of an engine's start in vLLM's own processes, derived from vLLM's log messages."""

from __future__ import annotations

import logging

from roll.system.signs import enter

STAGES = {
    "Starting to load model": "loading the model",
    "Model loading took": "model loaded",
    "Warming up model for the compilation": "compiling",
    "Dynamo bytecode transform time": "compiling",
    "Graph capturing finished": "CUDA graphs captured",
    "init engine (profile, create kv cache, warmup model) took": "engine built",
}
"""Stages by the beginning of vLLM's unformatted log message."""
LOGGERS = ("vllm.v1.worker", "vllm.v1.engine.core", "vllm.compilation")
"""Loggers of these messages. The level of the messages is too low for vLLM to print them."""


class StageHandler(logging.Handler):
    """Reports each stage when it begins, and prints nothing else."""

    def emit(self, record: logging.LogRecord) -> None:
        """Report the stage that a log message indicates, if any."""
        message = str(record.msg).removeprefix("%s")
        stage = next((stage for begin, stage in STAGES.items() if message.startswith(begin)), None)
        if stage:
            enter(stage)


def tell_stages() -> None:
    """Start to report the stages of this process. Idempotent. vLLM's own output does not change, because its handler has its own level."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, StageHandler) for handler in logger.handlers):
            logger.addHandler(StageHandler(logging.INFO))
            logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
