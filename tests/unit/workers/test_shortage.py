"""Out-of-memory errors of vLLM and torch, verbatim from the installed versions, and the messages that users get for
them.
"""

from __future__ import annotations

import re

import pytest

from roll.config.schema.fields import walk
from roll.config.schema.rlvr import RlvrConfig
from roll.ray.process import engine_shortage
from tests.unit.house.installed import folder, messages

FULL = (
    "Free memory on device cuda:0 (12.31/139.8 GiB) on startup is less than desired GPU memory utilization (0.9, "
    "125.82 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
NO_CACHE = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine "
    "(this flag also controls CPU memory reservation on the CPU backend, despite its name). "
    "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)
SMALL_CACHE = (
    "To serve at least one request with the model's max seq len (32768), (1.75 GiB KV cache is needed, which is larger "
    "than the "
    "available KV cache memory (0.5 GiB). Based on the available memory, the estimated maximum model length is 9344. "
    "Try increasing "
    "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing `max_model_len` when "
    "initializing the engine. See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)
TORCH_PARTS = (
    "CUDA out of memory. Tried to allocate ",
    ". GPU ",
    " has a total capacity of ",
    " of which ",
    " is free. ",
)
"""Parts of torch's message, in order, as they appear in its CUDA library."""
TORCH = (
    "{}1.02 GiB{}0{}139.80 GiB{}310.50 MiB{}".format(*TORCH_PARTS)
    + "Including non-PyTorch memory, this process has 14.00 GiB in use."
)
CUDA_LIBRARY = folder("torch") / "lib" / "libc10_cuda.so"


@pytest.mark.parametrize(
    ("text", "path", "function"),
    [
        (FULL, "vllm/v1/worker/utils.py", "request_memory"),
        (NO_CACHE, "vllm/v1/core/kv_cache_utils.py", "_check_enough_kv_cache_memory"),
        (SMALL_CACHE, "vllm/v1/core/kv_cache_utils.py", "_check_enough_kv_cache_memory"),
    ],
)
def test_the_messages_are_those_of_the_installed_vllm(text: str, path: str, function: str) -> None:
    assert [message.pattern for message in messages(path, function) if message.fullmatch(text)]


@pytest.mark.skipif(not CUDA_LIBRARY.is_file(), reason="needs a torch that is built for CUDA")
def test_the_message_is_that_of_the_installed_torch() -> None:
    library = CUDA_LIBRARY.read_bytes()
    assert [part for part in TORCH_PARTS if part.encode() not in library] == []


@pytest.mark.parametrize(
    ("devices", "text", "parts"),
    [
        (
            (3,),
            FULL,
            [
                "device 3",
                "requested 125.82 GiB",
                "0.9",
                "12.31 of 139.8 GiB were free",
                "lower",
                "gpu_memory_utilization",
            ],
        ),
        ((4, 5), NO_CACHE, ["devices 4, 5", "KV cache", "raise", "gpu_memory_utilization", "kv_cache_gib"]),
        ((0,), SMALL_CACHE, ["device 0", "needs 1.75 GiB", "0.5 GiB were left", "response_length"]),
        (
            (0,),
            TORCH,
            ["requested another 1.02 GiB", "310.50 MiB of 139.80 GiB were free", "lower", "gpu_memory_utilization"],
        ),
        ((), NO_CACHE, ["its device"]),
    ],
)
def test_a_shortage_is_named(devices: tuple[int, ...], text: str, parts: list[str]) -> None:
    said = engine_shortage(
        devices,
        f"RuntimeError: Engine core initialization failed.\nloading\n(EngineCore pid=812) ValueError: "
        f"{text}\nTraceback",
    )
    assert said and "\n" not in said
    for part in parts:
        assert part in said


def test_keys_that_are_named_exist() -> None:
    keys = {step for key in walk(RlvrConfig) for step in key.path}
    said = [engine_shortage((0,), text) for text in (FULL, NO_CACHE, SMALL_CACHE, TORCH)]
    named = {word for text in said for word in re.findall(r"[a-z]+(?:_[a-z]+)+", text or "")}
    assert len(named) > 7
    assert named <= keys


def test_other_failures_are_left_alone() -> None:
    assert engine_shortage((0,), "RuntimeError: Engine core initialization failed. See root cause above.") is None
