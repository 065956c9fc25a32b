"""What vLLM's loader says at each weight sync."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vllm.model_executor.model_loader.reload import layerwise

from roll.weight_sync.vllm_plugin import GOT_NONE, RELOADING, says_more


def test_one_message_of_each_sync_is_dropped() -> None:
    logger, said = logging.getLogger(RELOADING), list[str]()
    reader = logging.Handler()
    reader.emit = lambda record: said.append(record.getMessage())
    speaker: Any = layerwise.logger
    assert speaker is logger and f'"{GOT_NONE}"' in Path(layerwise.__file__).read_text()
    logger.addHandler(reader)
    logger.addFilter(says_more)
    try:
        for message in (GOT_NONE, "%s: another"):
            speaker.warning(message, "RotaryEmbedding")
    finally:
        logger.removeFilter(says_more)
        logger.removeHandler(reader)
    assert said == ["RotaryEmbedding: another"]
