"""The export command writes its output folder completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.schema.model import ModelConfig
from roll.errors import CheckpointError
from roll.export import convert, source
from roll.export.__main__ import main
from roll.export.source import CheckpointSource


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-in for the checkpoint of a run that trained all weights."""
    found = CheckpointSource(tmp_path / "step_1", "model", ModelConfig.model_validate({}), 0, "rlvr")
    monkeypatch.setattr(source, "find_source", lambda path: found)
    return found.checkpoint


def test_export_folder_is_renamed_when_complete(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "exports" / "policy"

    def write(found: CheckpointSource, folder: Path, exact: bool) -> None:
        assert folder.is_dir() and not out.exists()
        (folder / "config.json").write_text(f"{found.model}, exact {exact}")

    monkeypatch.setattr(convert, "write_hf", write)
    assert main([str(checkpoint), str(out), "--format", "fp32"]) == 0
    assert {path.name for path in out.parent.iterdir()} == {"policy"}
    assert (out / "config.json").read_text() == "model, exact True"


def test_export_shows_its_stage_beside_its_result(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convert, "write_hf", lambda *_, **__: None)
    assert main([str(checkpoint), str(tmp_path / "policy")]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"driver: exporting {checkpoint}, ") and "s of CPU" in printed.err
    assert printed.out == f"hf: {tmp_path / 'policy'}\n"


def test_export_path_that_cannot_be_folder_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "policy"
    assert main([str(checkpoint), str(out)]) == 2
    assert f"out: '{out}' cannot be created" in capsys.readouterr().err


def test_export_names_missing_base_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convert.deepspeed_files, "trained_weights", lambda folder, as_held, with_frozen: {})
    gone = CheckpointSource(tmp_path / "step_1", str(tmp_path / "gone"), ModelConfig.model_validate({}), 0, "rlvr")
    monkeypatch.setattr(source, "find_source", lambda path: gone)
    assert main([str(checkpoint), str(tmp_path / "policy")]) == 2
    assert "the model" in (said := capsys.readouterr().err) and str(tmp_path / "gone") in said
    assert not (tmp_path / "policy").exists()


def test_failed_export_leaves_nothing_behind_each_time(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "policy"

    def fail(found: CheckpointSource, folder: Path, exact: bool) -> None:
        (folder / "model-00001.safetensors").write_bytes(b"half")
        raise CheckpointError("lm_head.weight")

    monkeypatch.setattr(convert, "write_hf", fail)
    for _ in range(2):
        assert main([str(checkpoint), str(out)]) == 3
        assert capsys.readouterr().err.splitlines()[-1] == "lm_head.weight"
        assert not list(tmp_path.iterdir())
