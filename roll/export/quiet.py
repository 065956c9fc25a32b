"""Keeps what libraries write about an export off the terminal, where the stages of the command are shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

ON_THE_CPU = "Setting accelerator to CPU"
"""Start of DeepSpeed's warning on a host without GPUs, where nothing is wrong."""


class WithoutAccelerator(logging.Filter):
    """Drops DeepSpeed's warning that there is no accelerator."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        return not record.getMessage().startswith(ON_THE_CPU)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """A context in which transformers shows no progress bars, and DeepSpeed does not warn about the CPU."""
    from transformers.utils import logging as transformers_logging  # takes a second, which a wrong path need not cost

    without, logger = WithoutAccelerator(), logging.getLogger("DeepSpeed")
    had_bars = transformers_logging.is_progress_bar_enabled()
    logger.addFilter(without)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(without)
        if had_bars:
            transformers_logging.enable_progress_bar()
