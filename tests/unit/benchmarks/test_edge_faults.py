"""The campaign of faults at the edges of runs: its places exist, a fault strikes once, and its table is right."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import edge_world
from benchmarks.edge_faults import RLVR_FAULTS, markdown, plays
from benchmarks.edge_runs import Fault, Play, Played, Player, Row, left_behind
from benchmarks.edge_strikes import FOLDER, RECORDED, Strike, act, claim, record_all, striking
from benchmarks.fault_runs import World
from roll.tracking import jsonl

PLAYS = plays(World(Path("/nowhere"), ""))
FAULTS = [(play, fault) for play in PLAYS for fault in play.faults]


def test_every_edge_fault_has_a_real_place() -> None:
    for place in {fault.place for _, fault in FAULTS if fault.place}:
        module, _, path = place.partition(":")
        assert callable(functools.reduce(getattr, path.split("."), importlib.import_module(module))), place


def test_edge_faults_have_distinct_names_and_means() -> None:
    names = [fault.name for _, fault in FAULTS]
    assert len(set(names)) == len(names) >= 37 and not any("/" in name for name in names), "names of files"
    assert len({play.name for play in PLAYS}) == len(PLAYS) and len(RLVR_FAULTS) >= 6
    inside = {fault.name for _, fault in FAULTS if fault.is_inside}
    known = {value for name, value in vars(edge_world).items() if name.isupper()}
    assert inside == known, "a fault that no agent or environment inflicts"


def test_an_armed_fault_strikes_one_process_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    assert not claim("full")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    method = striking(Strike("full", "a:b", "", f"fill {tmp_path}/missing", is_after=False), lambda number: number + 1)
    assert method(1) == 2 and not list(tmp_path.iterdir())
    (tmp_path / "full.armed").touch()
    assert method(1) == 2 and json.loads((tmp_path / "full.struck").read_text()).keys() == {"pid", "at"}
    assert not claim("full")
    with pytest.raises(KeyError):
        act("unknown")


@pytest.mark.parametrize("wrong", [{"statuses": [3]}, {"left": ["process 1"]}, {"unequal": ["step 1"]}, {"named": ""}])
def test_edge_runs_are_judged_by_every_trace(tmp_path: Path, wrong: dict[str, object]) -> None:
    def judged(named: str = "rank 1", **changed: object) -> bool:
        player = Player(tmp_path, Play("one", (), (Fault("killed", named="rank 1"),)))
        row = Row("killed", 1.0, 2.0, 3.0, named, must_name=True)
        player._played = Played("one", **({"statuses": [0], "rows": [row]} | changed))  # type: ignore[arg-type]
        return player._is_right()

    assert judged()
    assert not judged(**wrong)  # type: ignore[arg-type]


def test_runs_of_the_campaignrecord_all_groups() -> None:
    class JsonlTracker:
        def __init__(self, folder: str, groups_per_step: int = 4, groups_per_set: int = 8) -> None:
            self.kept = folder, groups_per_step, groups_per_set

    record_all(SimpleNamespace(JsonlTracker=JsonlTracker))
    assert JsonlTracker("a").kept == ("a", RECORDED, 8)
    assert "groups_per_step" in inspect.signature(jsonl.JsonlTracker.__init__).parameters


def test_only_own_and_unused_files_are_left_behind(tmp_path: Path) -> None:
    closed, opened, ours, other = (tmp_path / name for name in ("closed", "opened", "roll-7-a", "roll-77-a"))
    closed.touch()
    ours.mkdir()
    other.mkdir()
    with opened.open("w"):
        assert left_behind([closed, opened, ours, other, tmp_path / "missing"], {7}) == [closed, ours]


def test_edge_table_shows_what_became_of_faults() -> None:
    ended = Played("a", [3], [Row("x", 1.0, 1.5, None, "rank 1", must_name=True)], end=5.0, is_right=True)
    missed = Played("b", [0], [Row("y", must_name=True)], ["process 7"], end=5.0)
    *_, first, second = markdown([ended.to_json(), missed.to_json()]).strip().splitlines()
    assert first == "| x | ended, exit 3 | 0.5 | 4.0 to the end | yes | none | yes |"
    assert second == "| y | did not strike, exit 0 | - | - | - | process 7 | **no** |"
