"""Ensures that only one process of roll compiles DeepSpeed's ops at a time, wherever in DeepSpeed the compilation
starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils import cpp_extension
from torch.utils.cpp_extension import load

from roll.backend import Rank
from roll.system.signs import announce
from roll.training.deepspeed.extension_locks import turn_to_compile

SHARE_OF_START = 0.8
"""Largest fraction of the start deadline to wait for another compilation, so that the error reports this wait and not a
late start.
"""


@contextmanager
def compiling_in_turn(rank: Rank) -> Iterator[None]:
    """Make DeepSpeed compile every op under `turn_to_compile` while the block lasts. A compilation may then raise
    TimeoutError.

    DeepSpeed compiles ops at first use, for example in `init_distributed` or a backward pass, so they cannot be
    compiled in advance. It always compiles through `torch.utils.cpp_extension.load`, which this function replaces.
    """
    seconds = SHARE_OF_START * rank.start_timeout

    def load_in_turn(name: str, *arguments: Any, **settings: Any) -> Any:
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        with turn_to_compile(folder, seconds, f"{rank.role} rank {rank.rank}"):
            if (folder / f"{name}.so").exists():
                return load(name, *arguments, **settings)
            announce(f"compiling {name}")
            loaded = load(name, *arguments, **settings)
            announce(f"{name} compiled")
            return loaded

    cpp_extension.load = load_in_turn
    try:
        yield
    finally:
        cpp_extension.load = load
