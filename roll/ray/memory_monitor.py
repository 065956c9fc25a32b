"""Measures the memory of a worker process and its child processes, such as vLLM's engine."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Collection
from typing import Any

import psutil

ByDevice = list[dict[int, int]]
"""For each GPU of the host, the bytes that each process holds, by process id."""


class MemoryMonitor:
    """Current and peak memory of this process on its devices."""

    def __init__(self, device: str, read: Callable[[], ByDevice] | None = None) -> None:
        """`read` queries NVIDIA's driver, by default through NVML."""
        self._device, self._read = device, read or nvml
        self._most: int | None = None

    def held(self) -> int | None:
        """Return the bytes held on the fullest device, or torch's memory in this process if the driver does not list the process.

        Return None on the CPU, and for an engine in a child process that the driver does not list.
        """
        if self._device == "cpu":
            return None
        own = psutil.Process()
        held = held_by({own.pid, *(child.pid for child in own.children(recursive=True))}, self._read())
        torch = _torch_on_gpu()
        if held is None and torch is not None:
            return int(torch.cuda.memory_reserved())
        if held is not None:
            self._most = max(held, self._most or 0)
        return held

    def peak(self) -> int | None:
        """Return the peak in bytes: torch's peak or the largest result of `held`, whichever is larger.

        On the CPU, it is the peak resident memory of this process plus the current memory of its child processes.
        """
        if self._device == "cpu":
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return own + sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
        torch = _torch_on_gpu()
        self.held()
        return max(torch.cuda.max_memory_allocated() if torch is not None else 0, self._most or 0) or None


def _torch_on_gpu() -> Any:
    """Return torch if this process has used a GPU through it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def device_name() -> str | None:
    """Return the name of the GPU that torch uses in this process, None if it uses none."""
    torch = _torch_on_gpu()
    return torch.cuda.get_device_name() if torch is not None else None


def held_by(pids: Collection[int], devices: ByDevice) -> int | None:
    """Return the bytes of these processes on the device where they hold the most. None if the driver lists none of them."""
    sums = [sum(size for pid, size in processes.items() if pid in pids) for processes in devices if any(pid in pids for pid in processes)]
    return max(sums, default=None)


def nvml() -> ByDevice:
    """Return what NVIDIA's driver reports; an empty list if the driver or the package nvidia-ml-py is absent.

    In a container with its own process ids, the driver may not list the container's processes.
    """
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # only installed in GPU environments
    except ModuleNotFoundError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        listed = [pynvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles]
        return [{process.pid: process.usedGpuMemory for process in device if process.usedGpuMemory is not None} for device in listed]
    finally:
        pynvml.nvmlShutdown()
