"""Makes run folders like those of real runs, without the trainer's states."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.schema.pipelines import Config
from roll.config.schema.secrets import redacted
from roll.runs.checkpoint.manifest import LOOP_FILE, LoopState
from roll.runs.checkpoint.store import CheckpointStore


def run_folder(folder: Path, *overrides: str, name: str = "tiny/tiny_rlvr_lora_zero3", step: int = 1) -> Path:
    """Make and return the run folder of a shipped experiment, with the checkpoint of one step."""
    loaded: list[Config] = []
    words = ["--config-name", name, f"output_dir={folder}", *overrides]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        OmegaConf.to_yaml(OmegaConf.create(redacted(loaded[0].model_dump(mode="json")))), encoding="utf-8"
    )
    with CheckpointStore(folder / "checkpoints", 1).writing(step, required=[LOOP_FILE]) as checkpoint:
        LoopState(step, step, {}, {}, 0.0).write(checkpoint)
    return folder
