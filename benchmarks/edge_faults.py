"""Strikes runs at their edges: in a forward pass, a backward pass, a rename, a restart and an export, with signals to
the driver, a lost terminal, full disks, and agents and environments that stop. Reports for each fault whether the run
healed or ended rightly, when it was noticed, whether its cause was named, and what was left behind.

    python benchmarks/edge_faults.py [--only NAME ...] [--folder FOLDER] [--markdown FILE]

Complete runs are not repeated; remove NAME.json to repeat one. The back-off before a restart is 1 s. `faults.py` kills
and stops processes at random moments instead. Mounting small file systems needs the right to create a mount namespace.
The status is 1 if a run did not do what the table of `plays` says.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGHUP, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

from benchmarks import edge_world
from benchmarks.edge_runs import Fault, Hit, Play, Player, Reader
from benchmarks.fault_plan import Kind
from benchmarks.fault_runs import World
from benchmarks.faults import prepare

TRAIN = "roll.training.deepspeed.strategy:DeepSpeedTrain."
SYNC = "roll.weight_sync.transfer:BucketSender.write_bucket"
RESTART = r"restart \d+ of"
ENDED = "the run ended: (failed|interrupted)"
STEPS = 14
"""Number of steps of the reinforcement-learning runs that are compared. They have one engine, so that steps wait for
it: with two, a run would need many more, because it goes on without the one that is replaced.
"""


def sft(*keys: str, steps: int = 120) -> tuple[str, ...]:
    """Return the arguments of a run of the fine-tuning pipeline."""
    kept = ("~data_split", "eval_steps=0", "save_steps=5", f"max_steps={steps}", "max_restarts=10")
    trained = ("num_train_epochs=100", "per_device_train_batch_size=16")
    return ("--config-name", "tiny/tiny_sft", *kept, *(f"sft_train.training_args.{key}" for key in trained), *keys)


def rlvr(world: World) -> tuple[str, ...]:
    """Return the arguments of a run with an engine, whole weights and a judge in the run."""
    words = world.command("-", 1)[3:]
    return (*(word for word in words if not word.startswith("output_dir=")), "actor_infer.world_size=1")


def acting(environment: str, steps: int) -> tuple[str, ...]:
    """Return the arguments of a run whose episodes are played in an environment."""
    block = f"environment: 'benchmarks.edge_world:Asks', {environment} max_turns: 4, sessions_per_process: 16"
    return (
        *("--config-name", "tiny/tiny_rlvr_lora_zero3", "pretrain=warm/export", f"max_steps={steps}", "save_steps=2"),
        *("~rewards", "~reference", "use_kl_loss=false", "kl_loss_coef=0", "eval_steps=0", "validation=null"),
        *("prompt_length=32", "+sequence_length=64", "actor_train.data_args.template=chatml", "rollout_batch_size=4"),
        *("num_return_sequences_in_group=2", f"+environments={{arithmetic: {{{block}}}}}", "max_restarts=10"),
    )


def trainer(name: str, method: str, rank: int = 1, **more: Any) -> Fault:
    """Return a fault of a rank of the fine-tuning run's trainer, in a method of its strategy."""
    named = rf"sft_train rank {rank}"
    return Fault(name, TRAIN + method, f"sft_train-{rank}", noticed=RESTART, named=named, **more)


SFT_FAULTS = (
    trainer("rank 1 killed amid a checkpoint's write", "save"),
    trainer("rank 1 stopped amid a backward pass", "_backward", action="stop"),
    trainer("rank 0 killed amid a forward pass", "_loss", rank=0),
    trainer("its successor killed in the load", "load", rank=0, at_once=True),
    Fault(
        "both ranks killed at once",
        hits=(Hit("sft_train-0", SIGKILL), Hit("sft_train-1", SIGKILL)),
        noticed=RESTART,
        named=r"sft_train rank \d",
    ),
    trainer("rank 0 exits with 0 amid a checkpoint's write", "save", rank=0, action="exit"),
    Fault(
        "rank 1 killed amid an optimizer's step, older checkpoints deleted",
        "deepspeed.runtime.engine:DeepSpeedEngine.step",
        "sft_train-1",
        deletes="checkpoints/step_*",
        noticed=RESTART,
        named="sft_train rank 1",
    ),
    trainer("rank 1 killed amid the export", "export", steps=0, back="exported|finished|the run ended: done"),
)


def engine(name: str, *hits: Hit) -> Fault:
    """Return a fault of the engine."""
    named = "actor_infer rank 0"
    return Fault(name, hits=hits, noticed=f"{named} (died|is replaced)", back=f"{named} is back after", named=named)


RLVR_FAULTS = (
    Fault(
        "rank 1 killed in the first sync", SYNC, "actor_train-1", steps=0, noticed=RESTART, named="actor_train rank 1"
    ),
    Fault(
        "rank 0 stopped amid a sync, reward worker killed",
        SYNC,
        "actor_train-0",
        "stop",
        hits=(Hit(Kind.REWARD, SIGKILL),),
        noticed=RESTART,
        named="actor_train rank 0",
    ),
    engine("vLLM's process killed", Hit(Kind.CORE, SIGKILL)),
    Fault(
        "its successor killed in the restart",
        "roll.engines.vllm.strategy:VllmGenerate.start",
        "actor_infer-0",
        at_once=True,
        noticed="actor_infer rank 0",
        back="actor_infer rank 0 is back after",
        named="actor_infer rank 0",
    ),
    engine("vLLM's process stopped", Hit(Kind.CORE, SIGSTOP)),
    Fault(
        "engine and trainer rank killed at once",
        hits=(Hit(Kind.ENGINE, SIGKILL), Hit(Kind.TRAINER, SIGKILL, rank=1)),
        noticed=RESTART,
        named="actor_train rank 1",
    ),
    Fault(
        "judge's engine killed",
        hits=(Hit(Kind.JUDGE, SIGKILL),),
        noticed="rewards.judged rank 0 (died|is replaced)",
        back="rewards.judged rank 0 is back after",
        named="rewards.judged rank 0",
    ),
    Fault(
        "reward's process stopped",
        hits=(Hit(Kind.CHILD, SIGSTOP),),
        noticed="",
        named=r"running calls are repeated: it was stopped \(SIGSTOP\)",
    ),
)


def driver(name: str, *hits: Hit, **more: Any) -> Fault:
    """Return a fault after which the run ends."""
    return Fault(name, hits=hits, **{"steps": 12, "noticed": ENDED, "back": "", **more})


ENDED_AGENT = "an agent was ended: .*"
NAMED = {
    edge_world.SUPERVISOR_KILLED: f"{ENDED_AGENT}supervisor died of SIGKILL",
    edge_world.AGENT_STOPPED: f"{ENDED_AGENT}SIGSTOP",
    edge_world.ORPHANED: f"{ENDED_AGENT}supervisor died of SIGKILL",
    edge_world.ENVIRONMENT_KILLED: "died of SIGKILL",
    edge_world.ENVIRONMENT_STOPPED: r"stopped \(SIGSTOP\)",
}
"""Patterns of the causes that faults of agents and environments must name. Environments name them in their own log."""


def world_fault(name: str) -> Fault:
    """Return a fault that an agent or an environment inflicts on itself."""
    named = NAMED.get(name, "")
    return Fault(name, is_inside=True, noticed=named if named.startswith(ENDED_AGENT) else "", named=named)


def single(name: str, fault: Fault, *statuses: int, **more: Any) -> Play:
    """Return a fine-tuning run with one fault, and its permitted statuses."""
    return Play(name, sft(), (fault,), (statuses,), **more)


def plays(world: World) -> tuple[Play, ...]:
    """Return all runs, the undisturbed ones before those that must equal them."""
    return (*ranks(), *signals(), *terminals(), *infrastructure(), *disks(), *agents(), *engines(world))


def ranks() -> tuple[Play, ...]:
    """Return the fine-tuning runs whose ranks die and stop."""
    return (Play("still-sft", sft(), ()), Play("ranks", sft(), SFT_FAULTS, still="still-sft"))


def signals() -> tuple[Play, ...]:
    """Return the fine-tuning runs whose driver gets a signal."""
    named, term = "stopped by a signal", Hit(Kind.DRIVER, SIGTERM)
    published = "roll.runs.checkpoint.store:CheckpointStore._publish"
    killed = Fault("driver killed just after a checkpoint's rename", published, is_after=True, steps=0, noticed="")
    return (
        single("term", driver("SIGTERM", term, named=named), 130),
        single("term-twice", driver("SIGTERM twice", term, replace(term, delay=1.4), named=named), 130),
        single("hangup", Fault("SIGHUP", hits=(Hit(Kind.DRIVER, SIGHUP),), noticed=""), 0),
        Play("renamed", sft(), (killed,), ((-SIGKILL,), (0,)), still="still-sft"),
    )


def terminals() -> tuple[Play, ...]:
    """Return the fine-tuning runs that lose what reads their output."""
    lost = {"steps": 12, "closes_reader": True, "noticed": ""}
    return (
        single("no-terminal", Fault("terminal closed", **lost), 0, reader=Reader.TERMINAL),
        single("no-reader", Fault("stdout closed from the start", steps=0, noticed=""), 0, reader=Reader.GONE),
        single("lost-reader", Fault("reader of stdout killed", **lost), 0, reader=Reader.PIPE),
    )


def infrastructure() -> tuple[Play, ...]:
    """Return the fine-tuning runs that lose a process of Ray."""
    lost = "Ray: its process"
    stop, kills = Hit(Kind.RAYLET, SIGSTOP), (Hit(Kind.GCS, SIGKILL), Hit("sft_train-1", SIGKILL))
    return (
        single("raylet", driver("raylet stopped", stop, noticed=lost, named=rf"{lost} raylet .*\(SIGSTOP\)"), 3),
        single("gcs", driver("GCS and rank 1 killed at once", *kills, noticed=lost, named=f"{lost} gcs_server"), 3),
    )


def disks() -> tuple[Play, ...]:
    """Return the fine-tuning runs whose disk is full, or whose checkpoints are deleted."""
    metrics, full = "roll.tracking.jsonl:JsonlTracker.log", "fill {run}"
    unsaved, unlogged = r"checkpoints/step_\d+: cannot be written \(\d+ MiB", "metrics.jsonl: cannot be written"
    saving = driver("disk full amid a checkpoint", place=f"{TRAIN}save", action=full, steps=0, named=unsaved)
    logging = driver("disk full at metrics.jsonl", place=metrics, action=full, steps=1, named=unlogged)
    deleted = Fault("checkpoints deleted while running", steps=25, deletes="checkpoints/step_*", noticed="")
    return (
        single("full-checkpoint", replace(saving, log="sft_train-0"), 3, full="run"),
        Play("full-metrics", sft("save_steps=0"), (logging,), ((3,),), full="run"),  # a checkpoint needs space earlier
        single("deleted", deleted, 0, still="still-sft"),
    )


def agents() -> tuple[Play, ...]:
    """Return the runs whose agents and environments stop, die and send what is no text."""
    by_agents = (
        *(edge_world.AGENT_KILLED, edge_world.SURROGATE, edge_world.SUPERVISOR_KILLED, edge_world.AGENT_STOPPED),
        edge_world.ORPHANED,
    )
    by_environments = (
        *(edge_world.ENVIRONMENT_KILLED, edge_world.ENVIRONMENT_STOPPED, edge_world.ENVIRONMENT_SURROGATE),
    )
    agent = "agent: {function: 'benchmarks.edge_world:play'}, episode_timeout: 120,"
    return tuple(
        Play(name, acting(block, 2 * len(faults) + 2), tuple(world_fault(fault) for fault in faults))
        for name, block, faults in (("agents", agent, by_agents), ("environments", "", by_environments))
    )


def engines(world: World) -> tuple[Play, ...]:
    """Return the runs with engines: all their roles, and full shared memory."""
    memory, said = "/dev/shm", "/dev/shm|shared memory"
    full = driver("shared memory full amid a sync", place=SYNC, log="actor_train-0", action=f"fill {memory}", steps=1)
    small = Fault("shared memory of 1 MiB", steps=0, noticed="", back="", named=said)
    return (
        Play("still-rlvr", rlvr(world), ()),
        Play("six", rlvr(world), RLVR_FAULTS, still="still-rlvr"),
        Play("full-shared", rlvr(world), (replace(full, named=said),), ((3,),), full=memory, mib=512),
        Play("no-shared", rlvr(world), (small,), ((2, 3),), full=memory, mib=1),
    )


def markdown(played: Sequence[Mapping[str, Any]]) -> str:
    """Return the table with a row for each fault."""
    table = [
        "| fault | outcome | noticed s | back at work s | cause named | left behind | as it must be |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in played:
        ends, right = ", ".join(map(str, one["statuses"])), "yes" if one["is_right"] else "**no**"
        left = "; ".join(one["left"]) or "none"
        for row in one["rows"]:
            table.append(f"| {row['fault']} | {_outcome(row, ends)} | {_times(row, one['end'])} | {left} | {right} |")
        if one["compared"] or one["unequal"]:
            table.append(
                f"| *{one['name']}: {one['compared']} prompts compared* | {len(one['unequal'])} unequal |"
                f" | | | | {right} |"
            )
    return "\n".join(table) + "\n"


def _outcome(row: Mapping[str, Any], ends: str) -> str:
    if row["at"] is None:
        return f"did not strike, exit {ends}"
    return f"{'healed' if row['back'] else 'ended'}, exit {ends}"


def _times(row: Mapping[str, Any], end: float) -> str:
    """Return the cells of times and cause. A run that ended has the seconds until its end."""
    if row["at"] is None:
        return "- | - | -"
    noticed = f"{row['noticed'] - row['at']:.1f}" if row["noticed"] else "-"
    back = f"{row['back'] - row['at']:.1f}" if row["back"] else f"{end - row['at']:.1f} to the end"
    return f"{noticed} | {back} | {'yes' if row['named'] else 'no' if row['must_name'] else '-'}"


def main() -> int:
    """Play the remaining runs, and print the table. Return 0 if every run did as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of runs (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("output/benchmark-edges"))
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args()
    signal.signal(SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no run outlives the campaign
    if signal.getsignal(SIGHUP) is signal.SIG_IGN:  # under nohup; the runs must not inherit it
        signal.signal(SIGHUP, lambda number, _: None)
    folder = options.folder.absolute()
    prepare(folder)
    chosen = plays(World(folder, "", STEPS))
    for play in chosen:
        record = folder / f"{play.name}.json"
        wanted = options.only is None or play.name in options.only
        if wanted and not record.exists():
            played = Player(folder, play).run()
            print(f"{play.name}: exit {played.statuses} after {played.seconds:.0f} s", flush=True)
            record.write_text(json.dumps(played.to_json(), indent=1))
    records = [folder / f"{play.name}.json" for play in chosen]
    played = [json.loads(record.read_text()) for record in records if record.exists()]
    text = markdown(played)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    return 0 if all(one["is_right"] for one in played) else 1


if __name__ == "__main__":
    sys.exit(main())
