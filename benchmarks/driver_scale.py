"""Measures what the driver of a run costs from 8 to 4,096 GPUs: CPU seconds by part, messages and memory of a step.

    python benchmarks/driver_scale.py [--gpus 8,64,512,4096] [--samples-per-gpu 32] [--layout shared] [--profile]
        [--ray] [--json FILE]

The loop, scheduler, pool of engines, rewards, weight sync, packing, metrics, records and the watch of processes are
those of a real run. Only the Ray actors are stubs in this process (`benchmarks/scale_stubs.py`), whose CPU time is
subtracted. They answer at once, each response singly, as in a long rollout. Every GPU has an engine and a rank of the
trainer and of the reference, which take turns (`--layout shared`), or half of them generate (`--layout apart`). Each
engine may run half of its samples at a time. The step is the first of its process, which each size has for itself.

Ray's own cost of a message is not part of it: `--ray` measures that with an actor of a real cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from benchmarks import scale_stubs
from benchmarks.scale_stubs import Engine, Ledger, Rewarder, StubGroup, StubNodes, Trainer
from roll.algorithms.advantages import Normalisation
from roll.algorithms.objectives import PolicyLoss
from roll.config.derived.placement import RolePlan, neighbours
from roll.config.schema.roles import RewardConfig
from roll.engines.actor_infer import ActorInfer
from roll.engines.pool import Running, RunningLimit
from roll.ray.device_sharing import DeviceSharing
from roll.ray.liveness import EVERY, Liveness
from roll.ray.placement import WorkerPlacement
from roll.ray.process import AsyncProcess
from roll.ray.role_signs import RoleActivity
from roll.rewards.reward_workers import Rewards
from roll.rollout.batch import Credit, CreditAssignment, Shaping
from roll.rollout.group import SingleTurns
from roll.rollout.reference import ReferenceAtOnce
from roll.rollout.scheduler import RolloutScheduler
from roll.runs.device_phases import DevicePhases
from roll.runs.meter import Meter
from roll.runs.position import Position
from roll.runs.rlvr.engine_sync import EngineSync
from roll.runs.rlvr.loop import Learning, Rlvr, StepMeter, train_rlvr
from roll.runs.rlvr.validation import Validation
from roll.system.step_memory import memory_of_steps
from roll.tracking.fanout import Tracking
from roll.tracking.jsonl import JsonlTracker
from roll.training.actor_train import ActorTrain, Reference, TrainShape
from roll.types import Prompt, Sampling, TensorSpec
from roll.weight_sync.routes import find_routes
from roll.weight_sync.sync import WeightSync

GROUP = 8
PROMPT_TOKENS = 40
GPUS_PER_NODE = 8
DOMAIN = "exact_match"
SECONDS = 3600.0
"""Value of every deadline, in seconds."""
TIMES = 3
"""Number of measured checks of the watch."""
REST = "batch, metrics, records"
SHAPE = TrainShape(updates=4, epochs=1, token_budget=32768, loss_agg_mode="token-mean", temperature=1.0)


@dataclass(frozen=True)
class Size:
    """A run to measure."""

    gpus: int
    samples: int
    mean_length: int
    layout: str
    buckets: int
    """Number of buckets of a weight sync, each with one tensor."""

    @property
    def roles(self) -> dict[str, RolePlan]:
        """The roles on GPUs, with one GPU for each rank."""
        half = self.gpus // 2 if self.layout == "apart" else 0
        train, infer = range(half, self.gpus), range(half or self.gpus)
        places = {"actor_train": train, "reference": train, "actor_infer": infer}
        return {name: RolePlan(name, "stub", tuple((device,) for device in on)) for name, on in places.items()}


class CpuParts:
    """Adds up the driver's CPU seconds by part, without those of the stubs and of nested parts."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._inner = ledger, 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.messages: Counter[str] = Counter()

    def now(self) -> float:
        """Return the CPU seconds of this process so far, without the stubs."""
        return time.process_time() - self._ledger.seconds

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begin, outer, self._inner = self.now(), self._inner, 0.0
        sent = self._ledger.messages.total()
        try:
            yield
        finally:
            spent = self.now() - begin
            self.seconds[part] += spent - self._inner
            self.messages[part] += self._ledger.messages.total() - sent
            self._inner = outer + spent

    def reset(self) -> dict[str, float]:
        """Return no wall-clock times, which mean nothing here."""
        return {}


class Source:
    """An unlimited `PromptSource`."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, count: int) -> list[Prompt]:
        """See `PromptSource`."""
        numbers = range(self._drawn, self._drawn + count)
        self._drawn += count
        ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
        return [Prompt(number, ids, "text", DOMAIN, {"ground_truth": "7"}) for number in numbers]

    def state_dict(self) -> dict[str, Any]:
        """See `PromptSource`."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PromptSource`."""
        self._drawn = state["drawn"]


class Steps:
    """Stands in for the checkpointer and the interrupt, and marks the beginning of the step."""

    stopped_early = ""

    def __init__(self, begin: Any) -> None:
        self._begin = begin

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Checkpointer`."""

    async def save_if_due(self, position: Position) -> None:
        """See `Checkpointer`."""

    def happened(self) -> bool:
        """See `Interrupt`. The loop asks before each step."""
        self._begin()
        return False


class Scene:
    """The driver of one run, with its groups of stubs."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.ledger, roles = size, Ledger(), size.roles
        self.parts = CpuParts(self.ledger)
        tensors = [
            TensorSpec(f"layer.{number}", "torch.bfloat16", (1 << 20,), 2 << 20) for number in range(size.buckets)
        ]
        self.liveness = Liveness(StubNodes(self.ledger))

        def group(name: str, role: RolePlan, make: Any, blocking: bool) -> StubGroup:
            places = [
                WorkerPlacement(f"node{devices[0] // GPUS_PER_NODE}", "cuda", {}, devices) for devices in role.devices
            ]
            made = StubGroup(self.ledger, make, name, places, folder, folder / f"{name}.held", blocking)
            made.start_at_once()
            self.liveness.watch(made, with_children=True)
            return made

        workers = RolePlan("rewards", "stub", tuple((node * GPUS_PER_NODE,) for node in range(max(1, size.gpus // 8))))
        self.groups = {
            "actor_train": group("actor_train", roles["actor_train"], lambda rank: Trainer(rank, tensors), True),
            "reference": group("reference", roles["reference"], lambda rank: Trainer(rank, tensors), True),
            "actor_infer": group("actor_infer", roles["actor_infer"], lambda rank: Engine(size.mean_length), False),
        }
        self.rewards = group("rewards", workers, lambda rank: Rewarder(), False)
        engines = len(self.groups["actor_infer"])
        limit = max(1, size.samples // engines // 2)
        running = Running([RunningLimit(limit, adapts=True) for _ in range(engines)], engines)
        deadlines = (SECONDS, SECONDS, SECONDS)
        self.infer = ActorInfer(self.groups["actor_infer"], running, *deadlines)
        self.train = ActorTrain(self.groups["actor_train"], SHAPE, folder, *deadlines)
        self.reference = Reference(self.groups["reference"], SHAPE.token_budget, 1.0, SECONDS, SECONDS)

    async def run(self, folder: Path, begin: Any) -> None:
        """Run a step. Call `begin` after the first weight sync, before the step."""
        size, section = self.size, RewardConfig.model_validate({})
        sharing = DeviceSharing(neighbours(size.roles))
        for name, role in {"actor_train": self.train, "reference": self.reference, "actor_infer": self.infer}.items():
            await sharing.register(name, role)
        phases = DevicePhases(sharing, self.parts)
        paths = partial(
            find_routes, size.roles["actor_train"], size.roles["actor_infer"], GPUS_PER_NODE, lambda _: True
        )
        sync = WeightSync(self.train, self.infer.engines, paths, False, 2 << 20, SECONDS)
        engines = EngineSync(sync, self.infer, phases, lambda settle: nullcontext())
        rewards = Rewards({DOMAIN: self.rewards}, {DOMAIN: section}, SECONDS)
        sampler = SingleTurns(self.infer, rewards, Sampling(4 * size.mean_length, GROUP))
        scheduler = RolloutScheduler(Source(), sampler, size.samples // GROUP, 0.0, seed=0)
        meter = Meter(self.groups, size.gpus, sharing.resident)
        meter._watch = cast(Any, self.parts)
        steps = cast(Any, Steps(begin))
        with Tracking(JsonlTracker(folder / "records")) as tracking:
            run = Rlvr(
                phases=phases,
                meter=StepMeter(meter, scheduler, self.infer, {}, None, 1000),
                scheduler=scheduler,
                engines=engines,
                trainer=self.train,
                needs_log_probs=False,
                reference=ReferenceAtOnce(self.reference.ref_log_probs),
                reference_role="reference",
                critic=None,
                teachers=None,
                self_teacher=None,
                learning=Learning(phases, self.train, PolicyLoss(kl_coef=0.1), SHAPE.updates),
                validation=Validation(0, 1, (), phases, engines, self.parts, tracking),
                checkpointer=steps,
                interrupt=steps,
                tracker=tracking,
                shaping=Shaping(),
                credit=CreditAssignment(Credit("grpo", Normalisation())),
                max_steps=1,
            )
            async with aclosing(scheduler):
                await train_rlvr(run, Position(0, 0))
        await self.infer.close()

    async def watch(self, times: int = TIMES) -> dict[str, float]:
        """Return CPU seconds and messages of one check of all processes, and of one look at their activity."""
        nodes, found = self.liveness._nodes, dict[str, float]()
        activity = RoleActivity(cast(Any, nodes))
        roles = [*self.groups.values(), self.rewards]

        async def look() -> None:
            for role in roles:
                await activity.of(role, "")

        for name, part in {"check": self.liveness.check, "signs of life": look}.items():
            begin, sent = self.parts.now(), self.ledger.messages.total()
            for _ in range(times):
                await part()
            found[f"{name}, seconds"] = (self.parts.now() - begin) / times
            found[f"{name}, messages"] = (self.ledger.messages.total() - sent) / times
        return found


@contextmanager
def no_ray() -> Iterator[None]:
    """A context in which the driver believes to be on a node of its own, and kills no actor."""
    here = SimpleNamespace(get_node_id=lambda: "driver")
    with (
        mock.patch.object(ray, "get_runtime_context", lambda: here),
        mock.patch.object(ray, "kill", lambda *_, **__: None),
        mock.patch.object(ray, "put", scale_stubs.Reference),
    ):
        yield


def measure(size: Size, profile: bool) -> dict[str, Any]:
    """Return the figures of one step of a run; with `profile`, the number of Python's calls as well."""
    profiler = cProfile.Profile() if profile else None
    with tempfile.TemporaryDirectory(prefix="roll-scale-") as made, no_ray(), memory_of_steps():
        scene = Scene(size, Path(made))
        ledger, begins = scene.ledger, list[float]()

        def begin() -> None:
            for counted in (scene.parts.seconds, scene.parts.messages, ledger.messages, ledger.bytes):
                counted.clear()
            ledger.largest = 0
            begins.append(scene.parts.now())
            if profiler:
                profiler.enable()

        async def run() -> dict[str, float]:
            await scene.run(Path(made), begin)
            if profiler:
                profiler.disable()
            found["seconds"] = scene.parts.now() - begins[-1]
            found["parts"] = dict(scene.parts.seconds)
            found["parts"][REST] = found["seconds"] - sum(scene.parts.seconds.values())
            found["messages"] = dict(ledger.messages.most_common())
            found["bytes"], found["largest"] = ledger.bytes.total(), ledger.largest
            found["messages of parts"] = dict(scene.parts.messages)
            return await scene.watch()

        found: dict[str, Any] = {}
        found |= asyncio.run(run())
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if profiler:
        stats = pstats.Stats(profiler, stream=sys.stderr)
        found["calls"] = cast(Any, stats).total_calls
        stats.sort_stats("tottime").print_stats(40)
    return found


def ray_message_seconds(calls: int = 2000) -> dict[str, float]:
    """Return the driver's CPU seconds, in all its threads, for one message to a real actor and its answer."""
    from roll.ray.cluster import cluster

    with tempfile.TemporaryDirectory(prefix="roll-scale-") as made, cluster(Path(made), 0, GPUS_PER_NODE) as session:
        actors: list[Any] = [
            cast(Any, AsyncProcess).remote(str(session.logs / f"{number}.log"), ()) for number in range(4)
        ]

        async def ask(count: int) -> float:
            begin = time.process_time()
            for _ in range(count // len(actors) // 8):
                await asyncio.gather(*(actor.pid.remote() for actor in actors for _ in range(8)))
            return (time.process_time() - begin) / count

        asyncio.run(ask(calls // 4))
        return {"seconds of a message": min(asyncio.run(ask(calls)) for _ in range(3))}


def main() -> int:
    """Measure each size in a process of its own, and print the tables."""
    options = parse()
    logging.disable(logging.WARNING)
    if options.one:
        size = Size(options.gpus[0], options.samples, options.mean_length, options.layout, options.buckets)
        print(json.dumps(measure(size, options.profile)))
        return 0
    found: dict[str, Any] = {}
    for gpus in options.gpus:
        samples = options.samples or options.samples_per_gpu * gpus
        given = [f"--gpus={gpus}", f"--samples={samples}", f"--layout={options.layout}", f"--buckets={options.buckets}"]
        command = [sys.executable, __file__, "--one", *given, f"--mean-length={options.mean_length}"]
        done = subprocess.run(  # noqa: S603
            command + ["--profile"] * options.profile, stdout=subprocess.PIPE, text=True, check=True
        )
        found[f"{gpus:,} GPUs"] = {"samples": samples, **json.loads(done.stdout.splitlines()[-1])}
    show(found)
    if options.ray:
        found["ray"] = ray_message_seconds()
        print(
            f"a message through Ray: {1e6 * found['ray']['seconds of a message']:.0f} microseconds of the driver's CPU"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    counts: Any = lambda text: [int(count) for count in text.split(",")]  # noqa: E731
    parser.add_argument("--gpus", type=counts, default=[8, 64, 512, 4096], help="sizes, separated by commas")
    parser.add_argument("--samples-per-gpu", type=int, default=32)
    parser.add_argument("--samples", type=int, help="samples of a step, for every size the same")
    parser.add_argument("--mean-length", type=int, default=64, help="mean tokens per response")
    parser.add_argument("--layout", choices=("shared", "apart"), default="shared")
    parser.add_argument("--buckets", type=int, default=16, help="buckets of a weight sync")
    parser.add_argument("--profile", action="store_true", help="print the functions that take most of a step")
    parser.add_argument("--ray", action="store_true", help="measure a message through Ray as well")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def show(found: Mapping[str, Any]) -> None:
    """Print a table with a column for each size."""
    table = Table("of a step", *found, title="The driver of a run")
    for name, value in rows(list(found.values())):
        table.add_row(name, *value)
    Console(width=140).print(table)


def rows(sizes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each figure, and its text for each size."""
    yield "samples", [f"{one['samples']:,}" for one in sizes]
    for part in dict.fromkeys(part for one in sizes for part in one["parts"]):
        yield f"CPU seconds: {part}", [f"{one['parts'].get(part, 0.0):.3f}" for one in sizes]
    yield "CPU seconds", [f"{one['seconds']:.2f}" for one in sizes]
    yield "CPU microseconds per sample", [f"{1e6 * one['seconds'] / one['samples']:.0f}" for one in sizes]
    yield "messages", [f"{sum(one['messages'].values()):,}" for one in sizes]
    yield "messages per sample", [f"{sum(one['messages'].values()) / one['samples']:.2f}" for one in sizes]
    yield "MiB of messages", [f"{one['bytes'] / 2**20:,.1f}" for one in sizes]
    yield "MiB of the largest message", [f"{one['largest'] / 2**20:,.2f}" for one in sizes]
    for name in ("check", "signs of life"):
        yield f"CPU seconds of one {name}", [f"{one[f'{name}, seconds']:.4f}" for one in sizes]
        yield f"messages of one {name}", [f"{one[f'{name}, messages']:,.0f}" for one in sizes]
    yield f"share of a core for checks, every {EVERY:g} s", [f"{one['check, seconds'] / EVERY:.1%}" for one in sizes]
    yield "peak memory, MiB", [f"{one['memory'] / 2**20:,.0f}" for one in sizes]


if __name__ == "__main__":
    raise SystemExit(main())
