"""The manifest of a checkpoint: sizes and digests of its files, and the errors of damaged checkpoints."""

import json
from pathlib import Path

import pytest

from roll.errors import CheckpointError
from roll.runs.checkpoint.manifest import MANIFEST, check_sizes, read_manifest, seal, verify_checkpoint


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "step_3"
    (folder / "actor_train").mkdir(parents=True)
    (folder / "loop.json").write_text("{}")
    (folder / "actor_train" / "rank_0.pt").write_bytes(bytes(range(256)) * 5000)
    seal(folder, step=3, sequence=7, required=["loop.json"])
    return folder


def test_manifest_names_files_with_size_and_digest(sealed: Path) -> None:
    written = json.loads((sealed / MANIFEST).read_text())
    assert (written["step"], written["sequence"], written["format"]) == (3, 7, 1)
    assert {name: entry["bytes"] for name, entry in written["files"].items()} == {
        "loop.json": 2,
        "actor_train/rank_0.pt": 1_280_000,
    }
    # XXH128 of the two bytes `{}`, computed with the reference program xxhsum.
    assert written["files"]["loop.json"]["xxh3"] == "dc7048f8f8747f561349cde127705c16"
    assert verify_checkpoint(sealed) == read_manifest(sealed)


def test_changed_byte_is_found_by_digest_only(sealed: Path) -> None:
    path = sealed / "actor_train" / "rank_0.pt"
    contents = bytearray(path.read_bytes())
    contents[700_000] ^= 1
    path.write_bytes(contents)
    check_sizes(sealed)
    with pytest.raises(CheckpointError, match="actor_train/rank_0.pt"):
        verify_checkpoint(sealed)


@pytest.mark.parametrize(("harm", "words"), [("truncate", "1279999 bytes, but 1280000"), ("remove", "missing")])
def test_short_or_absent_file_is_found_by_size(sealed: Path, harm: str, words: str) -> None:
    path = sealed / "actor_train" / "rank_0.pt"
    if harm == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=words):
        check_sizes(sealed)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2, "step": 3, "sequence": 1, "files": {}}',
        '{"format": 1, "step": "3", "sequence": 1, "files": {}}',
    ],
)
def test_unreadable_manifest_raises_with_its_path(sealed: Path, text: str) -> None:
    (sealed / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=str(sealed / MANIFEST)):
        read_manifest(sealed)


def test_what_is_not_whole_is_not_sealed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing was written"):
        seal(tmp_path, step=1, sequence=1, required=[])
    (tmp_path / "empty.pt").touch()
    with pytest.raises(CheckpointError, match="'empty.pt' is empty"):
        seal(tmp_path, step=1, sequence=1, required=["empty.pt"])
    with pytest.raises(CheckpointError, match="'loop.json' is missing"):
        seal(tmp_path, step=1, sequence=1, required=["loop.json"])
    (tmp_path / "link").symlink_to("empty.pt")
    with pytest.raises(CheckpointError, match="neither a file"):
        seal(tmp_path, step=1, sequence=1, required=[])
    assert not (tmp_path / MANIFEST).exists()
