"""Imports of large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """A context in which to import large libraries: without garbage collection.

    Collections take a fifth of the time of such imports, because they look at all modules again and again. Afterwards
    they skip what exists at the end of the context.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
