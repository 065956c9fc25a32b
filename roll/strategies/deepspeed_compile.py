"""Compiles DeepSpeed's ops in one process of roll at a time, whichever part of DeepSpeed asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils import cpp_extension
from torch.utils.cpp_extension import load

from roll.strategies.base import Rank
from roll.strategies.extension_locks import turn_to_compile
from roll.system.signs import enter

SHARE_OF_START = 0.8
"""Largest share of the start's deadline to wait for another compilation. The error then names the compilation, not the late start."""


@contextmanager
def compiling_in_turn(rank: Rank) -> Iterator[None]:
    """While the block lasts, DeepSpeed compiles every op through `turn_to_compile`, which raises TimeoutError.

    DeepSpeed compiles at first use, in places that cannot be called beforehand (`init_distributed`, a backward pass), and always by
    `torch.utils.cpp_extension.load`, in whose place this puts its own function.
    """
    seconds = SHARE_OF_START * rank.start_timeout

    def load_in_turn(name: str, *arguments: Any, **settings: Any) -> Any:
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        with turn_to_compile(folder, seconds, f"{rank.role} rank {rank.rank}"):
            if (folder / f"{name}.so").exists():
                return load(name, *arguments, **settings)
            enter(f"compiling {name}")
            loaded = load(name, *arguments, **settings)
            enter(f"{name} compiled")
            return loaded

    cpp_extension.load = load_in_turn
    try:
        yield
    finally:
        cpp_extension.load = load
