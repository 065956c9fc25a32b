"""A batch-invariant engine sets NCCL's variables for its own communicators, and opens the trainer's route without."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils import nccl

from roll.weight_sync import vllm_plugin
from roll.weight_sync.messages import route_as_plain
from roll.weight_sync.routes import Route, Transport


def test_route_opens_without_pinned_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(vllm_plugin, "BucketReader", lambda *_: seen.append(os.environ.get("NCCL_PROTO")))
    # What vLLM does on a GPU, where it asks the library for its version.
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: True)
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    for name in ("NCCL_PROTO", "NCCL_NO_CACHE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    receiver: Any = object.__new__(vllm_plugin.BucketReceiver)
    receiver.parallel_config, receiver.device = SimpleNamespace(rank=0), "cpu"
    opened = vllm_plugin.RouteOpened(**route_as_plain(Route(Transport.FILE, same_host=True), None))
    receiver.init_transfer_engine(opened)
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple"})
    receiver._reader = None
    receiver.init_transfer_engine(opened)
    assert seen == [None, None] and os.environ["NCCL_PROTO"] == "Simple"
