"""Writes and restores checkpoints, and exports the policy at the end of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from roll.config.derived.batch import learner
from roll.config.schema.model import ModelConfig
from roll.config.schema.pipelines import Config
from roll.errors import ConfigError, Fault
from roll.runs.changed_keys import Change, changes, recorded
from roll.runs.checkpoint.manifest import LOOP_FILE, LoopState
from roll.runs.checkpoint.store import CheckpointStore
from roll.runs.device_phases import DevicePhases
from roll.runs.improvement import Improvement
from roll.runs.position import Epochs, Position
from roll.system.own_folder import make_way, new_folder
from roll.tracking.card import CARD, fingerprint, model_card

LOG = logging.getLogger(__name__)
EXPORT = "export"
EXPORT_MARK = ".exported_by_roll"
"""Name of the file that marks an export, with the hash of its model card. A folder without it is not removed."""
CRITIC_FOLDER = "critic"
"""Name of the critic's folder in that of the policy's state."""
CONFIG_FILE = "config.yaml"
"""Name of the file in a run folder with the configuration of its latest start."""


class Resumable(Protocol):
    """A part of the loop with state in checkpoints: a position in the data, or values that carry over between steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        ...


class Unconsumed(Protocol):
    """Holder of results for future steps, saved in checkpoints, so that they are not computed again."""

    async def save(self, folder: Path) -> None:
        """Write the results, if there are any."""
        ...

    async def load(self, folder: Path) -> None:
        """Read the results that `save` wrote, if any."""
        ...


class Trainer(Protocol):
    """The operations of a learner that checkpoints need."""

    @property
    def save(self) -> Callable[[Path], Awaitable[None]]:
        """Return the function that writes the training state to a folder, so that `load` continues exactly."""
        ...

    @property
    def load(self) -> Callable[[Path], Awaitable[None]]:
        """Return the function that restores the training state that `save` wrote."""
        ...

    @property
    def export(self) -> Callable[[Path], Awaitable[None]]:
        """Return the function that exports the policy to a Hugging Face or PEFT folder."""
        ...


class Checkpointer:
    """Chooses the checkpoint to resume from, decides when the next one is due, and reads and writes checkpoints."""

    last: tuple[int, Path] | None
    """Step and folder of the newest checkpoint that the run has written or resumed from."""
    is_at_end: bool
    """Whether the newest checkpoint contains the last step that the run took."""
    exported: Path | None
    """Folder of the exported policy; None until this run has exported it."""

    def __init__(
        self, config: Config, store: CheckpointStore, submit: Callable[[Path, int | None], None] | None = None
    ) -> None:
        """Find the checkpoint of `resume_from_checkpoint`.

        Args:
            submit: takes each complete checkpoint, with the step of the best one, for its upload.

        Raises:
            ConfigError: the given path is not a checkpoint.
            CheckpointError: the checkpoint is incomplete.
        """
        self._config, self._store, self._submit = config, store, submit
        self._began = time.monotonic()
        self._folder = store.resolve(config.resume_from_checkpoint)
        self._state = LoopState.read(self._folder) if self._folder else None
        self.last = None if self._folder is None or self._state is None else (self._state.step, self._folder)
        self.is_at_end = False
        self.exported = None
        self._improvement = Improvement(config)
        self._improvement.load_state_dict(self._state.improvement if self._state else {})
        self._fingerprint: dict[str, str] = {}
        self._final = Path(config.output_dir).absolute() / EXPORT

    @property
    def trained_model(self) -> ModelConfig:
        """The `model_args` of the role that is trained."""
        return learner(self._config)[1].model_args

    @property
    def resumed_step(self) -> int | None:
        """Step of the checkpoint that the run resumes from; None for a fresh start."""
        return self._state.step if self._state else None

    def is_finished(self, last_step: int) -> bool:
        """Return whether an earlier run completed the last step, or ended early, and exported the policy."""
        return ((self.resumed_step or 0) >= last_step or bool(self.stopped_early)) and self._final.is_dir()

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, for `keep_best` and `early_stopping`.

        Raises:
            ConfigError: the first validation lacks their metric.
        """
        self._improvement.observe(step, metrics)

    @property
    def stopped_early(self) -> str:
        """Why and where `early_stopping` ends the run; an empty string if it does not."""
        return self._improvement.why_stopped

    @property
    def best(self) -> str:
        """What `keep_best` has kept: metric, value and folder. An empty string if nothing."""
        kept = self._improvement.kept
        if kept is None or kept.step is None:
            return ""
        return f"{kept.watched.metric} {kept.value:.4g} after step {kept.step}, {self._folder_of(kept.step)}"

    def _folder_of(self, step: int) -> Path:
        return self._store.folder / f"step_{step}"

    @property
    def changed(self) -> list[Change] | None:
        """The keys whose values differ from the checkpoint's configuration. None if that is not recorded."""
        if self._folder is None or self._state is None:
            return []
        before = self._state.config or _config_of_checkpoint(self._folder)
        return changes(before, self._config) if before else None

    def agree(self, fingerprint: Mapping[str, str], remedy: str, further: Sequence[Fault] = ()) -> None:
        """Check that the run's fingerprint agrees with the one in its checkpoint (`LoopState.basis`), and store it in
        new checkpoints.

        Raises:
            ConfigError: values have changed, or there are `further` faults. The error lists each of the keys, with
                `remedy`.
        """
        written = self._state.basis if self._state else {}
        remedy = f"{remedy}; or start a new run: resume_from_checkpoint=never, or another output_dir"
        changed = [place for place, value in fingerprint.items() if written.get(place, value) != value]
        problems = {
            place: f"{fingerprint[place]}, but {self._folder} was written with {written[place]}" for place in changed
        }
        if faults := [*(Fault(place, problem, remedy, "changed") for place, problem in problems.items()), *further]:
            raise ConfigError(*faults)
        self._fingerprint |= fingerprint

    async def restore(
        self,
        trainer: Trainer,
        source: Resumable,
        credit: Resumable | None = None,
        unconsumed: Unconsumed | None = None,
        last_step: int | None = None,
        epochs: Epochs | None = None,
    ) -> Position:
        """Restore every part from the checkpoint and return its position. Without a checkpoint, return the start of the
        run.

        Offline pipelines pass `last_step` and `epochs`, because they may end before `max_steps`.
        """
        self._trainer, self._source, self._credit, self._unconsumed = trainer, source, credit, unconsumed
        last_step = last_step or self._config.max_steps
        assert last_step is not None, "only offline pipelines may leave max_steps unset"
        self._last_step, self._epochs = last_step, epochs
        self._improvement.load_state_dict(self._state.improvement if self._state else {})
        if self._folder is None or self._state is None:
            return Position(0, 0)
        await trainer.load(self._folder.absolute())
        source.load_state_dict(self._state.sampler)
        if credit is not None and self._state.credit:
            credit.load_state_dict(self._state.credit)
        if unconsumed is not None:
            await unconsumed.load(self._folder)
        return Position(self._state.step, self._state.policy_version)

    def go_back(self) -> int | None:
        """Make the next `restore` read this run's newest checkpoint, or else the one that it resumed from.

        Return the step of that checkpoint; None means the start of the run.
        """
        if self.last is not None and self.last[1] != self._folder:
            self._folder, self._began = self.last[1], time.monotonic()
            self._state = LoopState.read(self._folder)
        return self.resumed_step

    async def save_if_due(self, position: Position) -> None:
        """Write a checkpoint if one is due: every `save_steps` steps, at the end of each epoch, or if the step is the
        best so far for `keep_best`.
        """
        every = self._config.save_steps
        if every == "epoch":
            is_due = self._epochs is not None and self._epochs.end_in(position.step)
        else:
            is_due = every > 0 and position.step % every == 0
        kept = self._improvement.kept
        if is_due or (kept and kept.step == position.step):
            await self._save(position)

    async def finish(self, position: Position) -> None:
        """Write a checkpoint of `position` if it is missing, and export the policy if all steps are done or
        `early_stopping` ended the run.

        Do neither if `save_at_end` is false.
        """
        if not self._config.save_at_end:
            return
        if self.last is None or position.step != self.last[0]:
            await self._save(position)
        self.is_at_end = True
        if self._ends_at(position):
            await self._export()

    def _ends_at(self, position: Position) -> bool:
        return position.step >= self._last_step or bool(self.stopped_early)

    async def _save(self, position: Position) -> None:
        spent = time.monotonic() - self._began + (self._state.seconds if self._state else 0.0)
        credit = {} if self._credit is None else self._credit.state_dict()
        if self._config.save_at_end and self._ends_at(position):
            # Remove the export of an earlier, shorter run. Otherwise this run would look finished if it were killed
            # before its own export.
            self._make_way()
        state = LoopState(
            step=position.step,
            policy_version=position.policy_version,
            sampler=self._source.state_dict(),
            basis=self._fingerprint,
            seconds=spent,
            credit=credit,
            config=recorded(self._config),
            improvement=self._improvement.state_dict(),
        )
        best = self._improvement.kept.step if self._improvement.kept else None
        with self._store.writing(position.step, required=[LOOP_FILE], best=best) as folder:
            await self._trainer.save(folder.absolute())
            if self._unconsumed is not None:
                await self._unconsumed.save(folder)
            state.write(folder)
        self.last = (position.step, self._folder_of(position.step))
        if self._submit is not None:
            self._submit(self.last[1], best)
        LOG.info("checkpoint of step %d: %s", *self.last)

    async def _export(self) -> None:
        with new_folder(self._final) as folder:
            await self._trainer.export(folder)
            self._write_card(folder)
            (folder / EXPORT_MARK).write_text(fingerprint(folder), encoding="utf-8")
            self._make_way()
        self.exported = self._final
        LOG.info("exported: %s", self._final)

    def _write_card(self, folder: Path) -> None:
        """Write the model card. Errors are only logged: they must not cost a trained model."""
        try:
            card = model_card(self._config, self._final.parent, folder, self.last[0] if self.last else 0)
            (folder / CARD).write_text(card, encoding="utf-8")
        except (OSError, ValueError, KeyError) as error:
            LOG.warning("the model card could not be written: %s: %s", type(error).__name__, error)

    def _make_way(self) -> None:
        """Remove an earlier export. One whose model card was changed is kept under another name."""
        mark, card = self._final / EXPORT_MARK, fingerprint(self._final)
        if card and mark.is_file() and mark.read_text(encoding="utf-8") != card:
            LOG.warning("%s was changed, so its folder is kept", self._final / CARD)
            mark.unlink()
        make_way(self._final, EXPORT_MARK)


def _config_of_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Return the configuration in the run folder of a checkpoint; empty if there is none."""
    path = checkpoint.absolute().parent.parent / CONFIG_FILE
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


class Restorable(Protocol):
    """A role with state in checkpoints."""

    async def save(self, folder: Path) -> None:
        """Write the training state, so that training continues exactly after `load`."""
        ...

    async def load(self, folder: Path) -> None:
        """Restore the training state that `save` wrote."""
        ...


@dataclass(frozen=True)
class OnloadedTrainer:
    """Implements `Trainer`: brings each role onto its devices before its state is written or read.

    The critic's state is in a subfolder. Only the policy is exported.
    """

    phases: DevicePhases
    role: str
    """Name of the policy's role."""
    policy: Trainer
    critic: Restorable | None = None

    async def save(self, folder: Path) -> None:
        await self.phases.checkpoint(self.role)
        await self.policy.save(folder)
        if self.critic:
            await self.phases.checkpoint("critic")
            await self.critic.save(folder / CRITIC_FOLDER)

    async def load(self, folder: Path) -> None:
        await self.phases.checkpoint(self.role)
        await self.policy.load(folder)
        if self.critic:
            await self.phases.checkpoint("critic")
            await self.critic.load(folder / CRITIC_FOLDER)

    async def export(self, folder: Path) -> None:
        await self.phases.checkpoint(self.role)
        await self.policy.export(folder)
