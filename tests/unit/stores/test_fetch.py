"""A run in a store is fetched by a command, and other commands name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll import compare
from roll.errors import CheckpointError, ConfigError
from roll.evaluation.settings import find_subject
from roll.export.__main__ import export_parser
from roll.runs import fetch
from roll.runs.checkpoint.manifest import read_manifest
from roll.runs.checkpoint.store import CHECKPOINTS, CheckpointStore
from roll.runs.checkpoint.stored import StoredCheckpoints
from roll.stores.store import Store

STEPS = (2, 4)


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Return the address of a run with checkpoints of two steps, and an upload of a third that is not complete."""
    address = (tmp_path / "bucket" / "run").as_uri()
    store, local = Store(address), CheckpointStore(tmp_path / "local", keep=2)
    for step in STEPS:
        with local.writing(step) as partial:
            (partial / "weights").write_text(f"of step {step}")
        StoredCheckpoints(store, keep=2).upload(tmp_path / "local" / f"step_{step}")
    store.write(f"{CHECKPOINTS}/step_6.3/weights", b"half")
    for name in ("config.yaml", "metrics.jsonl", "export/weights"):
        store.write(name, name.encode())
    return address


@pytest.mark.parametrize(("words", "step"), [((), 4), (("--step", "2"), 2)])
def test_fetched_folder_has_records_and_checkpoint(
    tmp_path: Path, address: str, words: tuple[str, ...], step: int
) -> None:
    before = Store(address).marks()
    assert fetch.main([address, str(tmp_path / "here"), *words]) == 0
    checkpoints = tmp_path / "here" / CHECKPOINTS
    assert [path.name for path in checkpoints.iterdir()] == [f"step_{step}"]
    assert (checkpoints / f"step_{step}" / "weights").read_text() == f"of step {step}"
    assert read_manifest(checkpoints / f"step_{step}").step == step
    records = sorted(path.name for path in (tmp_path / "here").iterdir() if path.is_file())
    assert records == ["config.yaml", "metrics.jsonl"], "an export without its mark is incomplete"
    assert Store(address).marks() == before


def test_damaged_checkpoint_leaves_no_folder(tmp_path: Path, address: str) -> None:
    (tmp_path / "bucket" / "run" / CHECKPOINTS / "step_4.2" / "weights").write_text("of step 5")
    with pytest.raises(CheckpointError, match="weights differ"):
        fetch.fetch_run(address, tmp_path / "here")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("name", "step", "code", "remedy"),
    [
        ("run", 6, "not_found", "give one of these"),
        ("other", None, "not_found", "give the address of a run"),
        ("?run", None, "malformed", "remove what follows"),
    ],
)
def test_what_cannot_be_fetched_is_named(
    tmp_path: Path, address: str, name: str, step: int | None, code: str, remedy: str
) -> None:
    given = address.removesuffix("run") + name
    with pytest.raises(ConfigError) as caught:
        fetch.fetch_run(given, tmp_path / "here", step)
    (fault,) = caught.value.faults
    assert fault.code == code and remedy in fault.remedy
    assert not (tmp_path / "here").exists()


def test_commands_that_read_folders_name_the_command(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"python -m roll.runs.fetch {address} FOLDER"
    for parse in (lambda: compare.main([address]), lambda: export_parser().parse_args([address, "out"])):
        with pytest.raises(SystemExit) as ended:
            parse()
        assert ended.value.code == 2 and command in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        find_subject(address)
    (fault,) = caught.value.faults
    assert fault.code == "unfit" and command in fault.remedy
