"""`WeightSync`: the order of its calls, versions and epochs, engines that die during a sync, and the reported causes of
failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
import torch

from roll.errors import WeightSyncError, WorkerAbandoned, WorkerDied, WorkerFailed, WorkerLate, WorkerWaited
from roll.types import TensorSpec
from roll.weight_sync import sync as weight_sync_module
from roll.weight_sync.bucket import Adapter, Bucket, read_bucket, spec, write_adapter, write_bucket
from roll.weight_sync.device import DeviceBucket
from roll.weight_sync.routes import MeetingPoint, Rendezvous, Route, SyncRoutes, Transport
from roll.weight_sync.sync import DidNotCome, WeightSync, gather_named
from tests import limits


class FakeSender:
    """A trainer with five fp32 tensors of 16 bytes each and an adapter with one tensor."""

    def __init__(self, engines: Engines, folder: Path) -> None:
        self.log, self.engines, self.folder = engines.log, engines, folder
        self.opened: list[tuple[SyncRoutes, Rendezvous | None]] = []
        self.cut: list[Rendezvous] = []
        self.stays_away = False
        """Whether the trainer never joins the broadcast."""
        self.weights = {f"w{number}": torch.full((4,), float(number)) for number in range(5)}
        self.lora = {"lora": torch.ones(2)}

    async def meeting_point(self, one_host: bool) -> MeetingPoint:
        return MeetingPoint("here", 1000 + len(self.opened))

    async def open_routes(self, routes: SyncRoutes, rendezvous: Rendezvous | None) -> None:
        self.opened.append((routes, rendezvous))
        if self.stays_away:
            await asyncio.get_running_loop().create_future()

    async def cut_off(self, rendezvous: Rendezvous) -> None:
        self.cut.append(rendezvous)

    async def tensors(self) -> list[TensorSpec]:
        return [spec(name, tensor) for name, tensor in self.weights.items()]

    async def send_bucket(self, names: Sequence[str], slot: int) -> Bucket:
        path = self.folder / f"bucket{slot}.safetensors"
        assert str(path) not in self.engines.loading, "a bucket was overwritten while the engine loads it"
        self.log.append(f"write {path.name} {' '.join(names)}")
        await asyncio.sleep(0)
        if "w4" in names and self.engines.fails_late:
            raise WeightSyncError("the trainer died")
        return write_bucket(path, {name: self.weights[name] for name in names})

    async def empty_buckets(self) -> None:
        self.log.append("empty")

    async def send_adapter(self) -> Adapter:
        self.log.append("adapter")
        return write_adapter(self.folder, '{"r": 8}', self.lora)


class Engines:
    """The common state of two engines that load slowly."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.loading: set[str] = set()
        self.loaded: list[dict[str, torch.Tensor]] = [{}, {}]
        self.stuck_engine = False
        self.fails_late = False
        self.fails_on = ""
        self.opened: list[tuple[int, Rendezvous | None]] = []
        self.dies_at: dict[int, str] = {}
        """By number of the engine: the call or the tensor at which it dies, or `dead` once it has died."""
        self.error: type[WorkerFailed] = WorkerDied
        self.given_up: list[tuple[int, str]] = []

    def live(self, number: int, what: str) -> None:
        if self.dies_at.get(number) in (what, "dead"):
            self.dies_at[number] = "dead"
            raise self.error("actor_infer", number, "the process died")


class FakeEngine:
    def __init__(self, number: int, all_of_them: Engines) -> None:
        self.number, self.all, self.version = number, all_of_them, 0
        self.name = f"engine {number}"

    async def give_up(self, cause: str) -> None:
        self.all.given_up.append((self.number, cause))

    async def pause(self) -> None:
        self.all.live(self.number, "pause")
        self.all.log.append(f"pause {self.number}")

    async def open_route(self, route: Route, rendezvous: Rendezvous | None) -> None:
        self.all.live(self.number, "open")
        self.all.opened.append((self.number, rendezvous))

    async def load_bucket(self, bucket: Bucket | DeviceBucket) -> None:
        assert isinstance(bucket, Bucket)
        assert not self.all.loading - {bucket.path}, "two buckets were loaded at the same time"
        self.all.loading.add(bucket.path)
        try:
            for _ in range(10):
                await asyncio.sleep(0)
        finally:
            self.all.loading.discard(bucket.path)
        self.all.live(self.number, bucket.tensors[0].name)
        if self.number == 1 and any(tensor.name == self.all.fails_on for tensor in bucket.tensors):
            raise WeightSyncError(f"{self.all.fails_on} is broken")
        self.all.loaded[self.number] |= {name: tensor.clone() for name, tensor in read_bucket(bucket).items()}
        self.all.log.append(f"loaded {self.number} {Path(bucket.path).name}")

    async def load_adapter(self, adapter: Adapter) -> None:
        self.all.live(self.number, "adapter")
        with adapter.folder() as folder:
            assert (folder / "adapter_config.json").read_text() == '{"r": 8}'
            self.all.loaded[self.number] |= read_bucket(adapter.weights)
        self.all.log.append(f"loaded {self.number} adapter")

    async def resume(self, policy_version: int) -> int:
        self.all.live(self.number, "resume")
        self.all.log.append(f"resume {self.number} {policy_version}")
        self.version = self.version if self.all.stuck_engine and self.number == 1 else policy_version
        return self.version


def by_broadcast(engines: Collection[int]) -> SyncRoutes:
    return SyncRoutes(
        {number: Route(Transport.BROADCAST, True, 1 + place) for place, number in enumerate(engines)},
        [0],
        1 + len(engines),
    )


def by_file(engines: Collection[int]) -> SyncRoutes:
    return SyncRoutes(dict.fromkeys(engines, Route(Transport.FILE, True)), [0], 0)


def sync(
    folder: Path, adapter: bool = False, find: Callable[[Collection[int]], SyncRoutes] = by_file
) -> tuple[WeightSync, FakeSender, Engines]:
    engines = Engines([])
    sender = FakeSender(engines, folder)
    made = [FakeEngine(number, engines) for number in range(2)]
    return WeightSync(sender, made, find, adapter, bucket_bytes=32, seconds=limits.CALL), sender, engines


def test_engines_pause_load_buckets_and_resume(tmp_path: Path) -> None:
    weight_sync, sender, engines = sync(tmp_path)
    assert weight_sync.versions == {0: None, 1: None}
    asyncio.run(weight_sync.push(3))
    assert engines.log == [
        *("pause 0", "pause 1"),
        "write bucket0.safetensors w0 w1",
        "write bucket1.safetensors w2 w3",
        *("loaded 0 bucket0.safetensors", "loaded 1 bucket0.safetensors"),
        "write bucket0.safetensors w4",
        *("loaded 0 bucket1.safetensors", "loaded 1 bucket1.safetensors"),
        *("loaded 0 bucket0.safetensors", "loaded 1 bucket0.safetensors"),
        "empty",
        *("resume 0 3", "resume 1 3"),
    ]
    for loaded in engines.loaded:
        assert loaded.keys() == sender.weights.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in sender.weights.items())
    assert weight_sync.versions == {0: 3, 1: 3}


def test_two_files_serve_any_number_of_buckets(tmp_path: Path) -> None:
    weight_sync, sender, engines = sync(tmp_path)
    sender.weights = {f"w{number}": torch.full((8,), float(number)) for number in range(9)}
    asyncio.run(weight_sync.push(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket0.safetensors", "bucket1.safetensors"]
    assert all(torch.equal(engines.loaded[0][name], tensor) for name, tensor in sender.weights.items())


def test_first_bucket_is_gathered_during_pause(tmp_path: Path) -> None:
    weight_sync, sender, engines = sync(tmp_path)
    asyncio.run(weight_sync.push(1))
    engines.log.clear()
    sender.weights |= {"w0": torch.zeros(4)}
    asyncio.run(weight_sync.push(2))
    assert engines.log[:4] == [
        "write bucket0.safetensors w0 w1",
        "pause 0",
        "pause 1",
        "write bucket1.safetensors w2 w3",
    ]
    assert not engines.loaded[1]["w0"].any() and weight_sync.versions == {0: 2, 1: 2}


def test_nothing_is_broadcast_before_all_engines_have_paused(tmp_path: Path) -> None:
    weight_sync, _, engines = sync(tmp_path, find=by_broadcast)
    asyncio.run(weight_sync.push(1))
    engines.log.clear()
    asyncio.run(weight_sync.push(2))
    assert engines.log[:3] == ["pause 0", "pause 1", "write bucket0.safetensors w0 w1"]


@pytest.mark.parametrize("dead", [[1], [0, 1]])
def test_a_bucket_for_old_routes_is_gathered_again(tmp_path: Path, dead: list[int]) -> None:
    weight_sync, sender, engines = sync(tmp_path)
    asyncio.run(weight_sync.push(1))
    engines.log.clear()
    engines.dies_at = dict.fromkeys(dead, "pause")
    left = [number for number in range(2) if number not in dead]
    assert asyncio.run(weight_sync.push(2)) == left
    written = [line for line in engines.log if line.startswith("write bucket0.safetensors w0")]
    assert len(written) == 1 + len(left) == len(sender.opened) and "empty" in engines.log


def test_an_adapter_travels_as_a_peft_folder(tmp_path: Path) -> None:
    weight_sync, sender, engines = sync(tmp_path, adapter=True, find=by_broadcast)
    asyncio.run(weight_sync.push(1))
    assert engines.log == [
        "pause 0",
        "pause 1",
        "adapter",
        "loaded 0 adapter",
        "loaded 1 adapter",
        "resume 0 1",
        "resume 1 1",
    ]
    assert torch.equal(engines.loaded[1]["lora"], sender.lora["lora"])
    assert [rendezvous for _, rendezvous in sender.opened] == [None] and not engines.opened, (
        "an adapter needs no broadcast"
    )


def test_an_engine_at_another_version_is_an_error(tmp_path: Path) -> None:
    weight_sync, _, engines = sync(tmp_path)
    engines.stuck_engine = True
    with pytest.raises(WeightSyncError, match="engine 1 .* version 0 .* 4"):
        asyncio.run(weight_sync.push(4))
    assert weight_sync.versions == {0: 4, 1: 0}


@pytest.mark.parametrize("broken", ["w0", "w2", "w4"], ids=["first bucket", "middle", "last"])
def test_failed_bucket_ends_sync_before_resume(tmp_path: Path, broken: str) -> None:
    weight_sync, _, engines = sync(tmp_path)
    engines.fails_on = broken
    with pytest.raises(WeightSyncError, match=f"{broken} is broken"):
        asyncio.run(weight_sync.push(1))
    assert not any(line.startswith("resume") for line in engines.log)
    assert weight_sync.versions == {0: None, 1: None}


def test_versions_are_unknown_from_pause_to_resume(tmp_path: Path) -> None:
    """A sync that fails leaves engines with parts of two versions, so the version before the sync is no longer
    theirs.
    """
    weight_sync, _, engines = sync(tmp_path)
    seen: list[dict[int, int | None]] = []

    class Watched(list[str]):
        def append(self, line: str) -> None:
            seen.append(dict(weight_sync.versions))
            super().append(line)

    asyncio.run(weight_sync.push(1))
    assert weight_sync.versions == {0: 1, 1: 1}
    engines.log = Watched()
    asyncio.run(weight_sync.push(2))
    assert len(seen) > 2 and all(versions == {0: None, 1: None} for versions in seen)
    assert weight_sync.versions == {0: 2, 1: 2}
    engines.fails_on = "w4"
    with pytest.raises(WeightSyncError):
        asyncio.run(weight_sync.push(3))
    assert weight_sync.versions == {0: None, 1: None}


def test_a_trainer_that_fails_leaves_no_load_behind(tmp_path: Path) -> None:
    weight_sync, _, engines = sync(tmp_path)
    engines.fails_late = True

    async def push() -> None:
        with pytest.raises(WeightSyncError, match="the trainer died"):
            await weight_sync.push(1)
        assert not engines.loading
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(push())
    assert not any(line.startswith("resume") for line in engines.log)


def test_each_engine_set_has_own_broadcast_epoch(tmp_path: Path) -> None:
    weight_sync, sender, engines = sync(tmp_path, find=by_broadcast)

    async def pushes() -> None:
        await weight_sync.push(1)
        weight_sync.choose({1: 0, 0: 0})
        await weight_sync.push(2)
        assert weight_sync.epoch == 0 and len(sender.opened) == 1, (
            "the same set of engines keeps its epoch and broadcast"
        )
        weight_sync.choose({1: 0})
        await weight_sync.push(3)
        assert weight_sync.versions == {0: 2, 1: 3}, "an engine that is left out keeps its version"
        weight_sync.choose({0: 0, 1: 0})
        await weight_sync.push(4)

    asyncio.run(pushes())
    assert weight_sync.epoch == 2 and weight_sync.versions == {0: 4, 1: 4}
    meetings = [rendezvous for _, rendezvous in sender.opened]
    assert meetings == [Rendezvous("here", 1000 + epoch, size, limits.CALL) for epoch, size in enumerate((3, 2, 3))]
    assert engines.opened == [(0, meetings[0]), (1, meetings[0]), (1, meetings[1]), (0, meetings[2]), (1, meetings[2])]


@pytest.mark.parametrize("at", ["pause", "w0", "w2", "w4", "resume"])
def test_dead_engine_is_excluded_and_others_load_everything(tmp_path: Path, at: str) -> None:
    weight_sync, sender, engines = sync(tmp_path)
    engines.dies_at = {1: at}
    assert asyncio.run(weight_sync.push(3)) == [0]
    assert engines.loaded[0].keys() == sender.weights.keys() and "resume 0 3" in engines.log
    assert [line for line in engines.log if line.startswith("loaded 0")] == [
        f"loaded 0 bucket{slot}.safetensors" for slot in (0, 1, 0)
    ]
    assert weight_sync.versions == {0: 3, 1: None} and not engines.given_up


@pytest.mark.parametrize("adapter", [True, False])
def test_who_comes_back_gets_everything(tmp_path: Path, adapter: bool) -> None:
    weight_sync, sender, engines = sync(tmp_path, adapter=adapter)
    engines.dies_at = {1: "adapter" if adapter else "w2"}
    assert asyncio.run(weight_sync.push(3)) == [0]
    weight_sync.choose({0: 0})
    assert asyncio.run(weight_sync.push(4)) == [0]
    engines.dies_at, engines.loaded[1] = {}, {}
    weight_sync.choose({0: 0, 1: 1})
    assert asyncio.run(weight_sync.push(5)) == [0, 1]
    assert engines.loaded[1].keys() == (sender.lora if adapter else sender.weights).keys()
    assert weight_sync.versions == {0: 5, 1: 5}


@pytest.mark.parametrize("at", ["pause", "w0", "w4"])
def test_where_all_die_nothing_more_is_gathered(tmp_path: Path, at: str) -> None:
    weight_sync, _, engines = sync(tmp_path)
    engines.dies_at = {0: at, 1: at}
    assert asyncio.run(weight_sync.push(3)) == []
    written = [line for line in engines.log if line.startswith("write")]
    assert len(written) == {"pause": 0, "w0": 2, "w4": 3}[at], (
        "each bucket is gathered while the previous one is loaded"
    )


def test_replaced_engine_process_reopens_its_broadcast(tmp_path: Path) -> None:
    weight_sync, sender, engines = sync(tmp_path, find=by_broadcast)
    asyncio.run(weight_sync.push(1))
    weight_sync.choose({0: 0, 1: 1})
    asyncio.run(weight_sync.push(2))
    assert weight_sync.epoch == 1 and len(sender.opened) == 2 and len(engines.opened) == 4


def test_death_before_broadcast_leaves_smaller_broadcast(tmp_path: Path) -> None:
    weight_sync, sender, engines = sync(tmp_path, find=by_broadcast)
    engines.dies_at = {1: "pause"}
    assert asyncio.run(weight_sync.push(1)) == [0]
    [(_, rendezvous)] = sender.opened
    assert rendezvous is not None and rendezvous.size == 2 and not engines.given_up


@pytest.mark.parametrize("at", ["open", "w0", "w2", "w4"])
def test_death_amid_broadcast_gives_up_the_others(tmp_path: Path, at: str, caplog: pytest.LogCaptureFixture) -> None:
    weight_sync, sender, engines = sync(tmp_path, find=by_broadcast)
    engines.dies_at = {1: at}
    assert asyncio.run(weight_sync.push(1)) == []
    [cause] = caplog.messages
    assert "was cut off: actor_infer rank 1: " in cause and engines.given_up == [(0, cause)]
    assert sender.cut == [rendezvous for _, rendezvous in sender.opened], (
        "otherwise the trainer would wait for the engine that died"
    )
    engines.dies_at = {}
    weight_sync.choose({0: 1, 1: 1})
    assert asyncio.run(weight_sync.push(1)) == [0, 1] and len(sender.opened) == 2


def test_death_before_first_sync_leaves_opening_to_it(tmp_path: Path) -> None:
    weight_sync, sender, engines = sync(tmp_path, find=by_broadcast)
    engines.dies_at = {1: "open"}
    asyncio.run(weight_sync.open_routes())
    assert [number for number, _ in engines.given_up] == [0] and len(sender.cut) == 1
    engines.dies_at = {}
    weight_sync.choose({0: 1, 1: 1})
    assert asyncio.run(weight_sync.push(1)) == [0, 1] and len(sender.opened) == 2


@pytest.mark.parametrize("at", ["pause", "w2", "resume"])
def test_engine_missing_its_deadline_is_replaced(tmp_path: Path, at: str) -> None:
    weight_sync, _, engines = sync(tmp_path)
    engines.dies_at, engines.error = {1: at}, WorkerLate
    assert asyncio.run(weight_sync.push(1)) == [0]
    assert engines.given_up == [(1, "the process died")]


def test_trainer_missing_from_broadcast_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync_module, "ECHO_SECONDS", 0.0)
    weight_sync, sender, engines = sync(tmp_path, find=by_broadcast)
    engines.dies_at, engines.error = {1: "open"}, WorkerWaited
    sender.stays_away = True
    with pytest.raises(WorkerLate, match="^actor_train rank 0: actor_train did not join .* engine 1 waited$"):
        asyncio.run(weight_sync.push(1))


async def fail(error: Exception) -> None:
    raise error


def test_the_cause_is_reported_and_not_its_echo() -> None:
    left = WorkerAbandoned("actor_infer", 0, "RuntimeError: Connection closed by peer")
    cause = WorkerFailed("actor_infer", 1, "the process died")

    async def both() -> None:
        await gather_named({"actor_infer rank 0": fail(left), "actor_infer rank 1": fail(cause)})

    async def one() -> None:
        await gather_named({"actor_infer rank 0": fail(left)})

    with pytest.raises(WorkerFailed, match="rank 1: the process died"):
        asyncio.run(both())
    with pytest.raises(WorkerFailed, match="rank 0"):
        asyncio.run(one())


def test_absent_member_is_named_instead_of_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync_module, "ECHO_SECONDS", 0.0)
    waited = WorkerWaited("actor_infer", 0, "RuntimeError: timed out")

    async def broadcast() -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await gather_named(
            {"actor_train": fail(waited), "actor_infer rank 0": fail(waited), "actor_infer rank 1": never}
        )

    with pytest.raises(WeightSyncError, match="^actor_infer rank 1 did .* actor_train, actor_infer rank 0 waited$"):
        asyncio.run(broadcast())


def test_message_of_thousands_of_engines_is_short() -> None:
    late = [f"actor_infer rank {number}" for number in range(4096)]
    error = DidNotCome(late, ["actor_train"])
    assert error.late == late and "actor_infer rank 7 and 4088 others" in str(error)
    assert len(str(error)) < 500
