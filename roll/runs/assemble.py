"""Runs an experiment from its checked configuration: checks models and data, opens the run folder, starts the roles and
runs the loop.

Decides whether a run restarts its trainer's side after the loss of a process, or ends.

Shows the states of the roles' processes on the console.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from roll.config.derived.placement import is_trainer_side
from roll.config.derived.trackers import chosen_trackers
from roll.config.load.env_file import secrets_of
from roll.config.plan.plan import Plan
from roll.config.plan.show import plan_text
from roll.config.schema.offline import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.secrets import redacted
from roll.errors import ConfigError, Fault, WorkerAbandoned, WorkerDied, WorkerFailed, WorkerLate
from roll.ray.cluster import cluster
from roll.ray.group import WorkerGroup
from roll.ray.liveness import RayNodes, is_own
from roll.ray.role_signs import RoleActivity
from roll.runs import changed_keys as resume_fingerprint
from roll.runs.changed_keys import Change, change_faults, recorded
from roll.runs.checkpoint.store import CHECKPOINTS, CheckpointStore
from roll.runs.checkpointer import CONFIG_FILE, EXPORT_MARK, Checkpointer
from roll.runs.early_processes import early_groups
from roll.runs.ending import RunEnding
from roll.runs.hosts import check_hosts
from roll.runs.hub import check_upload, upload
from roll.runs.interrupt import Interrupt
from roll.runs.run_context import Loop, PreparedRun, RunContext
from roll.runs.stored.start import finish_upload, in_store
from roll.system.event_loop import guarded, run_in_loop
from roll.system.imports import importing
from roll.system.own_folder import keep_aside
from roll.system.restart_budget import RestartBudget
from roll.system.step_memory import memory_of_steps
from roll.tracking.base import RunFacts, Tracker
from roll.tracking.console import StepLog, console_tracker
from roll.tracking.fanout import Tracking
from roll.tracking.history import END_FILE, STARTS_FILE, read_starts, write_start
from roll.tracking.jsonl import METRICS_FILE, JsonlTracker
from roll.tracking.life import TICK, ActivityDisplay
from roll.tracking.logs import RunLog
from roll.tracking.report.live import LiveReport
from roll.tracking.report.write import REPORT_FILE
from roll.tracking.trace import TRACE_FILE, Trace
from roll.tracking.trackers import open_named

if TYPE_CHECKING:
    from roll.runs.roles import Roles


async def show_activity(roles: Roles, life: ActivityDisplay) -> None:
    """Update the console until cancelled. Skip updates while its output is not visible."""
    asked = RoleActivity(RayNodes())
    while True:
        if life.is_seen:
            groups = roles.all_groups
            here = (process for group in groups.values() for process in group.processes() if is_own(process.node_id))
            life.own([process.pid for process in here])
            signs = await asyncio.gather(*(asked.of(group, roles.progress(name)) for name, group in groups.items()))
            life.driver(
                "all roles are ready" if roles.are_running else "starting the roles", is_busy=not roles.are_running
            )
            life.show([sign for sign in signs if sign])
        await asyncio.sleep(TICK)


BACK_OFF_SECONDS = (5.0, 30.0, 120.0)
"""Delays in seconds before the first, the second and each later restart within an hour."""


class Restarts:
    """Counts the restarts of a run's trainer side."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` is the largest number of restarts. `clock` returns seconds."""
        self._budget, self._clock = RestartBudget(most, back_off=BACK_OFF_SECONDS), clock
        self._restarts: list[float] = []
        self._failed_step: int | None = None

    @property
    def count(self) -> int:
        """Number of restarts so far."""
        return len(self._restarts)

    def wait_after(self, failure: WorkerFailed, step: int | None) -> float:
        """Count a restart after a failure in `step`, and return the seconds to wait before it.

        `step` is None if the failure happened while roles were being restarted. Then the lost process may be of any
        role.

        Raises:
            WorkerFailed: the failure, because a restart would not help. Its process raised an exception (such as bad
                input or memory that ran out), its role is not on the trainer's side, the same step failed before, or
                there were already `most` restarts.
        """
        is_loss = isinstance(failure, WorkerDied | WorkerLate | WorkerAbandoned) and (
            step is None or is_trainer_side(failure.role)
        )
        if not is_loss or not self._budget.most:
            raise failure
        if step is not None and step == self._failed_step:
            raise ended(failure, f"step {step} failed again after a restart")
        now, most = self._clock(), self._budget.most
        if (seconds := self._budget.delay(self._restarts, now)) is None:
            raise ended(failure, f"the roles were already restarted {self.count} times, and max_restarts is {most}")
        if step is not None:
            self._failed_step = step
        self._restarts.append(now)
        return seconds


def ended(failure: WorkerFailed, why: str) -> WorkerFailed:
    """Return a copy of the failure that also states why it ends the run."""
    return type(failure)(failure.role, failure.rank, f"{failure.cause}; {why}", failure.traceback)


LOG = logging.getLogger(__name__)
BEFORE_FIRST = -1
"""Last recorded step of a run without records. Records begin with step 0, which has the metrics before any training."""


def run_experiment(config: Config, plan: Plan, life: ActivityDisplay) -> None:
    """Run an experiment. Check models and data first, so that no model is loaded for a run that cannot work.

    The roles' processes start beside the check and import their libraries; see `early_groups`.

    `life` shows the activity of the driver and the roles.

    Raises:
        BadInput: the configuration, the data or a model cannot be used.
        RollError: a role or another part of the run failed.
        KeyboardInterrupt: the run was interrupted.
    """
    folder = _run_folder(config)
    secrets = secrets_of(config, plan.environment)
    with Interrupt() as interrupt, ExitStack() as stack:
        store = CheckpointStore(folder / CHECKPOINTS, config.keep_checkpoints)
        stack.enter_context(store.held())  # Locked first, because a second run would write into the files of this one.
        mirror = stack.enter_context(in_store(config, folder, store, interrupt.interruptible, life.driver))
        stack.enter_context(RunLog(folder, secrets.hide))
        ending = stack.enter_context(RunEnding(folder, secrets.hide))
        LOG.info("the plan:\n%s", plan_text(config, plan))
        checkpointer = Checkpointer(config, store, mirror.submit if mirror else None)
        changed = _changed(config, checkpointer)
        check_upload(config.push_to_hub)
        life.driver("starting Ray")
        gpus = max(plan.devices, default=-1) + 1
        with cluster(folder, gpus, config.num_gpus_per_node, secrets.hide) as session:
            early = early_groups(config, plan, session)
            life.driver("checking model and data")
            prepared = prepare_run(config)
            checkpointer.agree(
                resume_fingerprint.of_rows(config, prepared),
                "use the same files, columns, template, lengths and data_split as before",
            )
            steps = last_step(config, plan, prepared)
            if was_finished := _finished_before(config, checkpointer, steps, changed):
                stack.callback(print, was_finished, flush=True)  # the last line, after those of Ray's end
                return
            if prepared.rows is not None:
                print(f"{prepared.rows} rows, {plan.batch.sequences_per_step} per step: {steps} steps", flush=True)
            keep_strangers(folder)
            ending.begin(checkpointer, steps)
            write_config(config, folder)
            write_start(folder, secrets.hide, checkpointer.resumed_step, [str(one) for one in changed])
            LOG.info(
                "models and data were checked; starting %d roles, to continue after step %d",
                len(plan.roles),
                checkpointer.resumed_step or 0,
            )
            life.driver("opening the trackers")
            tracker = stack.enter_context(open_trackers(config, checkpointer.resumed_step, steps, life))
            _say_resumed(checkpointer, changed)
            stack.enter_context(memory_of_steps())
            trace = Trace(folder / TRACE_FILE, config.trace_steps, checkpointer.resumed_step)
            context = RunContext(plan, session, checkpointer, tracker, trace=trace)
            reopen = partial(_reopened, stack, config, steps, life)
            run_in_loop(partial(_run, config, prepared.loop, context, early, interrupt, life, reopen))
        finish_upload(mirror, interrupt.interruptible, life.driver)
        _upload(config, checkpointer.exported, interrupt, life)


def _upload(config: Config, export: Path | None, interrupt: Interrupt, life: ActivityDisplay) -> None:
    """Upload what this run exported if `push_to_hub` is set, and say where it is. Raises RollError if that fails."""
    if config.push_to_hub is None or export is None:
        return
    life.driver("uploading the export")
    with interrupt.interruptible():
        address = upload(export, config.push_to_hub, config.push_to_hub_private, left_out=EXPORT_MARK)
    LOG.info("uploaded: %s", address)
    print(f"uploaded: {address}", flush=True)


def last_step(config: Config, plan: Plan, prepared: PreparedRun) -> int:
    """Return the last step of the run: `max_steps`, or the step that ends the last epoch."""
    if not isinstance(config, OfflineConfig) or prepared.rows is None:
        assert config.max_steps is not None, "only offline pipelines may leave max_steps unset"
        return config.max_steps
    from roll.runs.offline.wiring import steps_of

    return steps_of(config, prepared.rows, plan.batch.sequences_per_step)


def _changed(config: Config, checkpointer: Checkpointer) -> list[Change]:
    """Return the keys changed since the checkpoint. Raises ConfigError unless `resume_with_changes` allows them."""
    changed = checkpointer.changed
    if changed is None:
        LOG.warning(
            "%s has no record of its configuration, so that changed keys are not found",
            checkpointer.last and checkpointer.last[1],
        )
    faults = change_faults(
        changed or [], config, checkpointer.last and checkpointer.last[1], resume_fingerprint.guarded_keys(config)
    )
    checkpointer.agree(resume_fingerprint.of_keys(config), "set it to the checkpoint's value", faults)
    checkpointer.agree(resume_fingerprint.of_weights(config), "set it to the model that the adapter was trained on")
    return changed or []


def _finished_before(config: Config, checkpointer: Checkpointer, steps: int, changed: Sequence[Change]) -> str:
    """Return what to say if an earlier run completed all steps, otherwise "". The run folder is not changed."""
    if not checkpointer.is_finished(steps):
        return ""
    reached = checkpointer.resumed_step or 0
    if reached < steps:
        return (
            f"{config.exp_name} has already {checkpointer.stopped_early}; raise early_stopping.patience, or remove the "
            f"block, to train on"
        )
    if any(one.is_of_experiment for one in changed):
        keys = ", ".join(one.key for one in changed if one.is_of_experiment)
        return (
            f"{config.output_dir} has completed {reached} steps with other values of {keys}; raise max_steps to train "
            f"with the new ones"
        )
    if reached > steps:
        return (
            f"{config.output_dir} has completed {reached} steps, more than max_steps, which is {steps}; nothing is "
            f"trained"
        )
    return f"{config.exp_name} has already completed its {steps} steps; its run folder is {config.output_dir}"


def _say_resumed(checkpointer: Checkpointer, changed: Sequence[Change]) -> None:
    if checkpointer.last is None:
        return
    print("resumed from step {}, {}".format(*checkpointer.last), flush=True)
    for one in changed:
        print(f"changed since that checkpoint: {one}", flush=True)
        LOG.info("changed since the checkpoint: %s", one)


def prepare_run(config: Config) -> PreparedRun:
    """Check models and data, and return the loop, ready to run. Raises BadInput if one cannot be used.

    The pipelines are imported here, because their libraries take seconds in which the roles' processes start.
    """
    with importing():
        import datasets

        from roll.runs.offline import wiring as offline
        from roll.runs.rlvr import replay
        from roll.runs.rlvr import wiring as rlvr

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    match config:
        case RlvrConfig(replay_from=None):
            return rlvr.prepare_rlvr(config)
        case RlvrConfig():
            return replay.prepare_replay(config)
        case SftConfig():
            return offline.prepare_sft(config)
        case DpoConfig():
            return offline.prepare_dpo(config)
        case RewardModelConfig():
            return offline.prepare_reward_model(config)
        case DistillConfig():
            return offline.prepare_distill(config)


def keep_strangers(folder: Path) -> None:
    """Rename files that a run would replace, but that no run has written: the folder has no records of a run."""
    if not any((folder / name).exists() for name in (STARTS_FILE, METRICS_FILE)):
        for path in (folder / name for name in (CONFIG_FILE, END_FILE, REPORT_FILE)):
            if os.path.lexists(path):
                keep_aside(path)


def write_config(config: Config, folder: Path) -> None:
    """Write the configuration to `config.yaml`, without secrets. An earlier one is kept as `config.start_N.yaml`."""
    path, text = folder / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(recorded(config)))
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        names = (folder / f"config.start_{start}.yaml" for start in count(len(read_starts(folder))))
        path.rename(next(name for name in names if not name.exists()))
    path.write_text(text, encoding="utf-8")


def _run_folder(config: Config) -> Path:
    """Create the run folder if it does not exist, and return it. Raises ConfigError if it cannot be created."""
    folder = Path(config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            Fault(
                "output_dir", f"'{folder}' cannot be created: {error.strerror}", "choose another folder", "not_writable"
            )
        ) from None
    return folder


async def _run(
    config: Config,
    loop: Loop,
    context: RunContext,
    early: Mapping[str, WorkerGroup[Any]],
    interrupt: Interrupt,
    life: ActivityDisplay,
    reopen: Callable[[int | None], Tracking],
) -> None:
    """Run the loop to completion. Restart it if the trainer's side loses a process; see `Restarts`."""
    from roll.runs.roles import Roles

    restarts = Restarts(config.max_restarts)
    async with AsyncExitStack() as stack:
        with interrupt.working():
            async with context.session.watched():
                roles = Roles(config, context.plan, context.session, stack, early)
                await check_hosts(config, early)
                while (lost := await _attempt(roles, loop, context, interrupt, life)) is not None:
                    seconds = restarts.wait_after(lost, context.tracker.step_under_way if roles.are_running else None)
                    await roles.end_trainer_side()
                    step = context.checkpointer.go_back()
                    _log_restart(lost, f"restart {restarts.count} of {config.max_restarts}", step)
                    await asyncio.sleep(seconds)
                    context.tracker.close()
                    life.wake()
                    context = replace(context, tracker=reopen(step), restarts=restarts.count)


async def _attempt(
    roles: Roles, loop: Loop, context: RunContext, interrupt: Interrupt, life: ActivityDisplay
) -> WorkerFailed | None:
    """Run the loop. Return the failure that ended it, or None. Raises WorkerFailed before all roles started."""
    try:
        async with roles.liveness.watched(is_trainer_side), guarded(show_activity(roles, life)):
            position = await loop(roles, context, interrupt)
            life.wake()  # the last checkpoint and the export may take minutes
            await context.checkpointer.finish(position)
    except WorkerFailed as failure:
        if not roles.have_started:
            raise
        return failure
    return None


def _log_restart(lost: WorkerFailed, which: str, step: int | None) -> None:
    """Log the failure, the number of the restart, and the step that the run continues from."""
    origin = "its start" if step is None else f"the checkpoint of step {step}"
    LOG.warning("%s; %s: the run continues from %s", lost, which, origin)
    LOG.info("%s\n%s", lost, lost.traceback)


def _reopened(stack: ExitStack, config: Config, steps: int, life: ActivityDisplay, step: int | None) -> Tracking:
    """Reopen the trackers to continue after `step`, or from the start. Remove the records of later steps."""
    before = BEFORE_FIRST if step is None else step
    named, faults = open_named(chosen_trackers(config), _facts(config, before), config.tracker_kwargs)
    for fault in faults:  # a service that has become unreachable does not end a run that has trained already
        LOG.warning("%s", fault.problem)
    return stack.enter_context(_tracking(config, before, steps, life, named))


def open_trackers(config: Config, resumed_step: int | None, steps: int, life: ActivityDisplay) -> Tracking:
    """Open the metrics file, the console tracker for a run of `steps` steps, and the trackers of `track_with`.

    Raises:
        ConfigError: a tracker cannot be opened. The records of an earlier start are unchanged.
    """
    named, faults = open_named(chosen_trackers(config), _facts(config, resumed_step), config.tracker_kwargs)
    if faults:
        for tracker in named:
            tracker.close()
        raise ConfigError(*faults)
    return _tracking(config, resumed_step, steps, life, named)


def _facts(config: Config, resumed_step: int | None) -> RunFacts:
    recorded_config = redacted(config.model_dump(mode="json"))
    return RunFacts(Path(config.output_dir), config.exp_name, recorded_config, resumed_step)


def _tracking(
    config: Config, resumed_step: int | None, steps: int, life: ActivityDisplay, named: Sequence[Tracker]
) -> Tracking:
    record = JsonlTracker(Path(config.output_dir), resumed_step)
    last_step = BEFORE_FIRST if resumed_step is None else resumed_step
    return Tracking(
        record,
        [console_tracker(config.exp_name, steps, life), StepLog(steps), LiveReport(Path(config.output_dir)), *named],
        last_step,
    )
