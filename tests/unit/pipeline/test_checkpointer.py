"""Checkpoints and exports over several runs in the same folder."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.schema.pipelines import Config
from roll.runs.checkpoint.store import CheckpointStore
from roll.runs.checkpointer import Checkpointer
from roll.runs.position import Epochs, Position


class Trainer:
    """Stands in for a trainer: its weights are a file that contains the step."""

    def __init__(self) -> None:
        self.step = 0

    async def save(self, folder: Path) -> None:
        (folder / "weights").write_text(str(self.step))

    async def load(self, folder: Path) -> None:
        self.step = int((folder / "weights").read_text())

    async def export(self, folder: Path) -> None:
        folder.mkdir()
        await self.save(folder)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def begin(folder: Path, *more: str) -> tuple[Checkpointer, Trainer, Position]:
    loaded: list[Config] = []
    words = ["--config-name", "tiny/tiny_warm_up", f"output_dir={folder}", *more]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    checkpointer, trainer = Checkpointer(loaded[0], CheckpointStore(folder / "checkpoints", keep=2)), Trainer()
    return checkpointer, trainer, asyncio.run(checkpointer.restore(trainer, trainer))


def test_run_killed_before_export_is_not_finished(tmp_path: Path) -> None:
    checkpointer, trainer, _ = begin(tmp_path, "max_steps=2")
    trainer.step = 2
    asyncio.run(checkpointer.finish(Position(2, 2)))
    assert begin(tmp_path, "max_steps=2")[0].is_finished(2)

    checkpointer, trainer, position = begin(tmp_path, "max_steps=4", "save_steps=2")
    assert position == Position(2, 2) and not checkpointer.is_finished(4)
    trainer.step = 4
    asyncio.run(checkpointer.save_if_due(Position(4, 4)))  # then the process is killed

    checkpointer, trainer, position = begin(tmp_path, "max_steps=4", "save_steps=2")
    assert not checkpointer.is_finished(4), "the export is from step 2, not from step 4"
    asyncio.run(checkpointer.finish(position))
    assert (tmp_path / "export" / "weights").read_text() == "4"
    assert begin(tmp_path, "max_steps=4")[0].is_finished(4)


def test_an_export_stays_where_no_other_is_written(tmp_path: Path) -> None:
    checkpointer, _, _ = begin(tmp_path, "max_steps=2")
    asyncio.run(checkpointer.finish(Position(2, 2)))
    checkpointer, _, _ = begin(tmp_path, "max_steps=4", "save_steps=2", "save_at_end=false")
    asyncio.run(checkpointer.save_if_due(Position(4, 4)))
    assert (tmp_path / "export" / "weights").is_file()


def test_a_checkpoint_is_written_where_an_epoch_ends(tmp_path: Path) -> None:
    loaded: list[Config] = []
    words = [
        "--config-name",
        "tiny/tiny_warm_up",
        f"output_dir={tmp_path}",
        "save_steps=epoch",
        "keep_checkpoints=9",
        "max_steps=null",
    ]
    compose(words, lambda composed, presets: loaded.append(checked_config(composed, presets)))
    checkpointer, trainer = Checkpointer(loaded[0], CheckpointStore(tmp_path / "checkpoints", keep=9)), Trainer()
    asyncio.run(checkpointer.restore(trainer, trainer, last_step=8, epochs=Epochs(rows=10, batch_size=4)))
    for step in range(1, 9):
        asyncio.run(checkpointer.save_if_due(Position(step, step)))
    written = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert written == ["step_3", "step_5", "step_8"], "epochs end at rows 10, 20 and 30, in steps 3, 5 and 8"


def test_folders_of_the_user_are_kept(tmp_path: Path) -> None:
    own = ["export", ".export.partial", "checkpoints/step_2"]
    for name in own:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "notes.txt").write_text(name)
    for steps, resume in ((2, "never"), (4, "auto")):
        checkpointer, trainer, _ = begin(tmp_path, f"max_steps={steps}", f"resume_from_checkpoint={resume}")
        trainer.step = steps
        asyncio.run(checkpointer.finish(Position(steps, steps)))
    assert sorted(path.read_text() for path in tmp_path.rglob("notes.txt")) == sorted(own)
    assert (tmp_path / "export" / "weights").read_text() == "4"
    assert len(list(tmp_path.glob("export*"))) == 2, "an export of the run itself is replaced"


def test_an_export_whose_card_was_changed_is_kept(tmp_path: Path) -> None:
    card = tmp_path / "export" / "README.md"
    for steps, text in ((2, None), (4, "mine"), (6, None)):
        checkpointer, trainer, _ = begin(tmp_path, f"max_steps={steps}")
        trainer.step = steps
        asyncio.run(checkpointer.finish(Position(steps, steps)))
        assert f"in {steps} steps" in card.read_text(encoding="utf-8")
        if text is not None:
            card.write_text(text, encoding="utf-8")
    [kept] = tmp_path.glob("export.kept_*")
    assert (kept / "README.md").read_text(encoding="utf-8") == "mine" and (kept / "weights").read_text() == "4"
