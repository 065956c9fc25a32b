"""Impossible exports are refused before anything is written. The run folders are real, but lack the trainer's
states.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.schema.pipelines import Config
from roll.export.__main__ import main
from roll.runs.checkpoint.manifest import LOOP_FILE, MANIFEST, LoopState
from roll.runs.checkpoint.store import CheckpointStore

LORA = "reward_train.model_args.lora_target=all-linear"


def run_folder(folder: Path, *overrides: str) -> Path:
    """Make and return the folder that the training of a reward model leaves after its first step, without the trainer's
    states.
    """
    loaded: list[Config] = []
    words = [
        "--config-name",
        "tiny/tiny_reward_model",
        f"output_dir={folder}",
        "pretrain=output/tiny/model",
        *overrides,
    ]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    folder.mkdir()
    (folder / "config.yaml").write_text(
        OmegaConf.to_yaml(OmegaConf.create(loaded[0].model_dump(mode="json"))), encoding="utf-8"
    )
    with CheckpointStore(folder / "checkpoints", 1).writing(1, required=[LOOP_FILE]) as checkpoint:
        LoopState(1, 1, {}, {}, 0.0).write(checkpoint)
    return folder


@pytest.mark.parametrize(
    ("overrides", "forms"),
    [((), ("hf", "fp32")), ((LORA,), ("peft", "merged", "fp32"))],
    ids=("all parameters", "LoRA"),
)
def test_reward_model_export_refuses_language_model_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], forms: tuple[str, ...]
) -> None:
    run = run_folder(tmp_path / "run", *overrides)
    for form in (None, *forms):
        words = [str(run), str(tmp_path / "out")] + ([] if form is None else ["--format", form])
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"--format: '{form or forms[0]}', " in said and "language model" in said
        assert "set it to universal;" in said
        assert not (tmp_path / "out").exists()


def test_export_refuses_run_with_broken_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run")
    (run / "config.yaml").write_text("pipeline: [", encoding="utf-8")
    assert main([str(run), str(tmp_path / "out"), "--format", "universal"]) == 2
    assert f"{run / 'config.yaml'}: cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "form", "why"),
    [((), "peft", "trained all weights"), ((), "merged", "trained all weights"), ((LORA,), "hf", "trained an adapter")],
)
def test_export_refuses_format_of_other_training_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], form: str, why: str
) -> None:
    run = run_folder(tmp_path / "run", *overrides)
    assert main([str(run), str(tmp_path / "out"), "--format", form]) == 2
    said = capsys.readouterr().err
    assert f"--format: '{form}', but the run {why}" in said
    assert not (tmp_path / "out").exists()


def test_export_of_incomplete_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    run = run_folder(tmp_path / "checkpoints" / "run")
    checkpoint = run / "checkpoints" / "step_1"
    (checkpoint / LOOP_FILE).unlink()
    assert main([str(run), str(tmp_path / "out")]) == 3
    said = capsys.readouterr().err
    assert "(step_1)" in said and "; export from a copy" in said
    assert "resume_from_checkpoint" not in said
    (checkpoint / MANIFEST).unlink()
    assert main([str(checkpoint), str(tmp_path / "out")]) == 3
    assert f"{checkpoint}: it has no {MANIFEST}" in capsys.readouterr().err
