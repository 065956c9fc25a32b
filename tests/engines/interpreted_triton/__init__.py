"""A backend of Triton for the CPU that compiles nothing: with TRITON_INTERPRET=1, Triton runs kernels in Python.

vLLM's second model runner, the only one that returns routes, has kernels of Triton, and Triton for the CPU is not on
PyPI. vLLM uses Triton on the CPU if a backend of the name `cpu` is announced; `interpreted_triton` announces this one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[3]
NAME = "interpreted_triton-0.dist-info"


@contextmanager
def interpreted_triton(folder: Path) -> Iterator[dict[str, str]]:
    """A context in which engines that are started run Triton's kernels in Python.

    Yields:
        The environment variables that do this, for other processes.
    """
    (folder / NAME).mkdir()
    (folder / NAME / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted-triton\nVersion: 0\n")
    (folder / NAME / "entry_points.txt").write_text(f"[triton.backends]\ncpu = {__name__}\n")
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    with mock.patch.dict(os.environ, variables), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        _forget()
        try:
            yield variables
        finally:
            _forget()


def _forget() -> None:
    """End the fork server, which has imported Triton, and forget variables that vLLM has read in this process."""
    forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
    if (envs := sys.modules.get("vllm.envs")) is not None:
        envs.disable_envs_cache()
