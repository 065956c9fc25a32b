"""What a run that resumes must find as it was: here, the weights beneath an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path

from roll.pipeline.resume_fingerprint import weights


def write_model(folder: Path, second: bytes) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(b"one" * 100_000)
    (folder / "model-2.safetensors").write_bytes(second)
    return str(folder)


def test_weights_are_the_same_wherever_they_lie_and_others_are_not(tmp_path: Path) -> None:
    given = weights(write_model(tmp_path / "a", b"two" * 100_000))
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    (tmp_path / "moved" / "config.json").write_text('{"use_cache": false}')
    assert weights(str(tmp_path / "moved")) == given
    assert weights(write_model(tmp_path / "b", b"owt" * 100_000)) != given
    assert weights(write_model(tmp_path / "c", b"two" * 100_001)) != given
    assert weights("Qwen/Qwen2.5-7B") == "'Qwen/Qwen2.5-7B'"
