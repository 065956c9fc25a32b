"""Whether models on two hosts are told apart, without reading all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.models import prints
from roll.models.prints import difference, file_print, model_print


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights").write_bytes(bytes(range(200)))
    return folder


def test_equal_folders_do_not_differ(model: Path) -> None:
    assert set(model_print(str(model))) == {"config.json", "sub/weights"}
    assert difference(model_print(str(model)), model_print(str(model))) is None


def test_absent_lacking_and_changed_files_are_told(model: Path) -> None:
    own = model_print(str(model))
    (model / "sub" / "weights").write_bytes(bytes(200))
    assert difference(own, model_print(str(model))) == "has another sub/weights"
    (model / "config.json").unlink()
    assert difference(own, model_print(str(model))) == "lacks config.json"
    assert difference(own, model_print(str(model / "absent"))) == "is not there"


@pytest.mark.parametrize("place", [0, 50, 99])
def test_three_pieces_of_a_file_count(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prints, "PIECE", 10)
    (tmp_path / "a").write_bytes(bytes(100))
    (tmp_path / "b").write_bytes(bytes(place) + b"x" + bytes(99 - place))
    assert file_print(tmp_path / "a") != file_print(tmp_path / "b")
    assert file_print(tmp_path / "absent") == ""


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        ({"commit": "a"}, {"commit": "b"}, "is commit b, and on the driver's host a"),
        ({"commit": "a"}, {"commit": "a"}, None),
        ({"commit": "a"}, {}, None),
        ({}, {}, None),
    ],
)
def test_commits_of_a_hub_model_are_compared(own: dict[str, str], other: dict[str, str], said: str | None) -> None:
    assert difference(own, other) == said
