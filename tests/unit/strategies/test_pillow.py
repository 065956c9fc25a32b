"""Processors that vLLM loads resize with Pillow, also where transformers would choose torchvision."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoImageProcessor, Idefics3Processor
from transformers.models.auto import image_processing_auto

from examples.tiny.make_seeing_model import write_seeing_model
from roll.engines.vllm.pillow import use_pillow


def test_loaded_processors_are_asked_for_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_seeing_model(tmp_path / "model", "idefics3", seed=0)
    asked: list[str | None] = []

    def resolved(backend: str | None, *_: object) -> str:
        asked.append(backend)
        return "pil"

    monkeypatch.setattr(image_processing_auto, "_resolve_backend", resolved)
    current = AutoImageProcessor.from_pretrained  # an engine of another test may have changed it
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", getattr(current, "func", current))
    Idefics3Processor.from_pretrained(tmp_path / "model")
    for _ in range(2):
        use_pillow()
        Idefics3Processor.from_pretrained(tmp_path / "model")
    assert asked == [None, "pil", "pil"]
