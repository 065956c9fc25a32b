"""Runs an evaluation, with the components of a training run except the learner."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import datasets

import roll
from roll.config.derived.placement import is_trainer_side
from roll.config.load.env_file import secrets_of
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.secrets import redacted
from roll.errors import ConfigError, DataError, Fault
from roll.evaluation.results import RESULTS_FILE, EvaluationResult, sample_record, set_result, write_results
from roll.evaluation.settings import Evaluation, Subject, with_option_names
from roll.export.__main__ import export
from roll.ray.cluster import ClusterSession, cluster
from roll.rewards.passing import Bars, bar_text
from roll.runs.assemble import show_activity
from roll.runs.interrupt import Interrupt
from roll.runs.rlvr.held_out import HeldOutInputs, held_out_groups, prepare_held_out
from roll.runs.roles import Roles
from roll.system.event_loop import guarded, run_in_loop
from roll.system.own_folder import own_folder
from roll.tracking.base import StepNotices
from roll.tracking.jsonl import SAMPLES_FILE, to_line
from roll.tracking.life import ActivityDisplay
from roll.tracking.logs import RunLog
from roll.types import RolloutGroup

LOG = logging.getLogger(__name__)
PARTS = 10
"""Number of progress lines for each set, and for the responses of all sets."""


def run_evaluation(evaluation: Evaluation, life: ActivityDisplay) -> EvaluationResult:
    """Answer every held-out prompt, score the answers, and write the results. `life` shows the stages.

    Raises:
        BadInput: the data, the model, the rewards or the output folder cannot be used.
        RollError: a part of the run failed.
        KeyboardInterrupt: the user interrupted the evaluation. The samples that were finished are in `samples.jsonl`.
    """
    config, plan, subject = evaluation.config, evaluation.plan, evaluation.subject
    folder = _new_folder(Path(config.output_dir))
    secrets = secrets_of(config, plan.environment)
    with Interrupt() as interrupt, ExitStack() as stack:
        stack.enter_context(RunLog(folder, secrets.hide))
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        life.driver("finding the weights")
        config = config.model_copy(update={"pretrain": stack.enter_context(_weights(subject, folder))})
        life.driver("reading the rows, and checking models and rewards")
        inputs = _inputs(evaluation, config)
        samples = stack.enter_context((folder / SAMPLES_FILE).open("wb", buffering=0))
        asked = {name: min(len(rows), evaluation.request.limit or len(rows)) for name, rows in inputs.held_out.items()}
        responses = sum(count * _samples(config, name) for name, count in asked.items())
        progress = EvaluationProgress(samples, asked, responses, inputs.bars)
        _print_stage(
            f"{', '.join(f'{name}: {count} of {len(inputs.held_out[name])} prompts' for name, count in asked.items())} "
            f"will be answered"
        )
        _print_stage(f"a response passes if: {bar_text(inputs.bars)}")
        _print_stage(
            f"starting {', '.join(f'{role.ranks} x {name} ({role.strategy})' for name, role in plan.roles.items())}"
        )
        life.driver("starting Ray")
        gpus = max(plan.devices, default=-1) + 1
        with cluster(folder, gpus, config.num_gpus_per_node, secrets.hide) as session:
            groups = run_in_loop(partial(_answers, evaluation, config, inputs, session, interrupt, progress, life))
        life.driver("computing the results")
        _print_stage("all responses are scored; computing the results")
        sets = {name: set_result(name, found, _samples(config, name), inputs.bars) for name, found in groups.items()}
        notices = StepNotices(inputs.watches).after(
            0, {name: value for one in sets.values() for name, value in one.metrics.items()}
        )
        for notice in notices:
            LOG.warning("%s", notice.text)
    step = subject.trained.step if subject.trained else None
    attention = [*(notice.text for notice in notices), *map(secrets.hide, progress.failures)]
    result = EvaluationResult(folder, subject.model, step, sets, attention)
    write_results(result, _facts(evaluation) | {"passes_if": bar_text(inputs.bars)})
    return result


def _inputs(evaluation: Evaluation, config: RlvrConfig) -> HeldOutInputs:
    """Return the held-out prompts and the models of the rewards.

    Raises:
        BadInput: see `prepare`. Faults of the data name the option of the command line instead of the configuration
            key.
    """
    try:
        return prepare_held_out(config)
    except DataError as error:
        raise DataError(*[with_option_names(fault, evaluation.request) for fault in error.faults]) from error


async def _answers(
    evaluation: Evaluation,
    config: RlvrConfig,
    inputs: HeldOutInputs,
    session: ClusterSession,
    interrupt: Interrupt,
    progress: EvaluationProgress,
    life: ActivityDisplay,
) -> dict[str, list[RolloutGroup]]:
    async with AsyncExitStack() as stack:
        with interrupt.working():
            async with session.watched():
                roles = Roles(config, evaluation.plan, session, stack)
                async with roles.liveness.watched(is_trainer_side), guarded(show_activity(roles, life)):
                    groups = await held_out_groups(config, inputs, roles, evaluation.request.limit, progress)
                    life.driver("ending the roles")
                    return groups


class EvaluationProgress:
    """Implements `Listener`: writes finished samples, and prints the progress and the failures of rewards."""

    def __init__(
        self,
        samples: BinaryIO,
        prompts: Mapping[str, int],
        responses: int,
        bars: Mapping[str, Bars],
    ) -> None:
        """
        Args:
            samples: file to write to.
            prompts: number of prompts of each set.
            responses: number of responses to all prompts.
            bars: when a response passes, by domain.
        """
        self._samples, self._prompts, self._responses, self._bars = samples, prompts, responses, bars
        self._done, self._answered = Counter[str](), 0
        self.failures: list[str] = []
        """Texts about rewards that failed."""

    def begun(self) -> None:
        _print_stage(f"all roles are ready; answering {', '.join(self._prompts)}: 0 of {self._responses} responses")

    def answered(self, responses: int) -> None:
        """See `Listener`. Environments may ask for a response again, so the number is bounded."""
        before, self._answered = self._answered, min(self._answered + responses, self._responses)
        if _is_due(before, self._answered, self._responses):
            _print_stage(f"answering: {self._answered} of {self._responses} responses")

    def failed(self, topic: str, text: str) -> None:
        LOG.warning("%s", text)
        self.failures.append(text)

    def finished(self, name: str, group: RolloutGroup) -> None:
        """See `Listener`. Write a prompt with its scored responses, and report the progress. Raises OSError."""
        self._samples.write(to_line(sample_record(name, group, self._bars)))
        self._done[name] += 1
        done, all_of_them = self._done[name], self._prompts[name]
        if _is_due(done - 1, done, all_of_them):
            _print_stage(f"scoring {name}: {done} of {all_of_them} prompts answered and scored")


def _is_due(before: int, after: int, total: int) -> bool:
    """Whether another of PARTS equal parts of the total is complete."""
    return after * PARTS // total != before * PARTS // total


def _print_stage(text: str) -> None:
    LOG.info("%s", text)
    print(text, file=sys.stderr, flush=True)


def _samples(config: RlvrConfig, name: str) -> int:
    assert config.validation is not None
    return config.validation.named_sets()[name].generating_args.num_return_sequences or 1


def _facts(evaluation: Evaluation) -> dict[str, Any]:
    trained = evaluation.subject.trained
    checkpoint = {"checkpoint": str(trained.source.checkpoint)} if trained else {}
    return checkpoint | {
        "roll": roll.__version__,
        "config": redacted(evaluation.config.model_dump(mode="json", exclude_defaults=True)),
    }


def _new_folder(folder: Path) -> Path:
    """Create the folder for the results, and return it. Raises ConfigError if it has results, or cannot be created."""
    if (folder / RESULTS_FILE).exists():
        raise ConfigError(
            Fault(
                "--output",
                f"'{folder}' already holds the results of an evaluation",
                "give another folder or remove it",
                "already_exists",
            )
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            Fault("--output", f"'{folder}' cannot be created: {error.strerror}", "give another folder", "not_writable")
        ) from None
    return folder


@contextmanager
def _weights(subject: Subject, folder: Path) -> Iterator[str]:
    """Yield the folder or Hub id of the model to load. For a checkpoint it is a temporary folder with the exported
    weights.

    Raises:
        DataError: the exported weights cannot be written.
    """
    if subject.trained is None:
        yield subject.model
        return
    source = subject.trained.source
    with own_folder(folder) as scratch:
        _print_stage(f"exporting the weights of {source.checkpoint}")
        out = scratch / "model"
        try:
            export(source.checkpoint, out, "hf" if source.model_args.lora_target is None else "merged")
        except OSError as error:
            raise DataError(
                Fault(
                    str(out),
                    f"the weights cannot be written: {error}",
                    "free disk space, or set --output to another disk",
                    "not_writable",
                )
            ) from error
        yield str(out.absolute())
