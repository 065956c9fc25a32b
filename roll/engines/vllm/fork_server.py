"""Forks the process of vLLM's engine from one that has imported vLLM already.

The engine's actor has threads, so that it must not fork. vLLM therefore spawns the engine's process there, which then
imports vLLM for a second time: 10 s of CPU time or more, while everything else waits. The fork server of Python's
`multiprocessing` has one thread. It imports vLLM while the actor does the same.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

IMPORTED = ["roll.engines.vllm.bound_to_parent", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"]
"""Modules that the fork server imports. The last one has most of what an engine needs, also on the CPU."""


BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""Environment variable that makes vLLM choose kernels whose results do not depend on the batch. Some of its modules
read it at their import.
"""


class EngineProcess(ForkServerProcess):
    """A process with the environment variables that this process has when it starts it, as after a spawn.

    Otherwise it would have those of the fork server's start. Libraries that read a variable at their import have read
    it in the fork server.
    """

    _environment: dict[str, str]

    def start(self) -> None:
        """See `multiprocessing.Process`."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """See `multiprocessing.Process`."""
        os.environ.clear()
        os.environ.update(self._environment)
        gc.freeze()
        gc.enable()  # disabled by the fork server
        super().run()


class EngineContext(ForkServerContext):
    """Starts each process as an `EngineProcess`."""

    Process = EngineProcess


def start_fork_server(compiles: bool, batch_invariant: bool) -> None:
    """Start the fork server of this process, which imports vLLM. Idempotent. Does not wait for the imports.

    Unless the engine `compiles`, `torch.compile` does nothing in it. torch reads that variable at its import.
    `batch_invariant` is what vLLM will read, whatever the process inherited. torch's compiler then chooses no kernel by
    its speed if that could change the rounding: two engines, or two runs, would measure another one as the fastest.
    """
    if not compiles:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    os.environ[BATCH_INVARIANT] = str(int(batch_invariant))
    if batch_invariant:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    forkserver.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()


@contextmanager
def forked_engine() -> Iterator[None]:
    """A context in which vLLM forks its engine's process from the fork server."""
    starts: Any = import_module("vllm.v1.engine.utils")
    of_vllm = starts.get_mp_context
    starts.get_mp_context = EngineContext
    try:
        yield
    finally:
        starts.get_mp_context = of_vllm
