"""Images in OCI layouts: their layers become one folder, and everything else is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.tiny.make_image import write_image
from roll.agents.containers.layout import BadImage
from roll.agents.containers.unpacked import unpacked
from roll.errors import FaultCode
from tests import limits
from tests.unit.containers.layers import content_of, tar_of

BELOW = {"a": "1", "folder/b": "2", "folder/c": "3", "other/d": "4", "lib": "->usr/lib", "usr/lib/e": "5"}


@pytest.mark.parametrize(
    ("above", "left"),
    [
        ({"a": "new"}, {**BELOW, "a": "new"}),
        ({".wh.a": ""}, {path: text for path, text in BELOW.items() if path != "a"}),
        ({".wh.folder": ""}, {path: text for path, text in BELOW.items() if not path.startswith("folder")}),
        # Whiteouts hide the layers below, not their own layer, and may stand behind what they keep.
        (
            {"folder/new": "6", "folder/.wh..wh..opq": ""},
            {**{path: text for path, text in BELOW.items() if not path.startswith("folder")}, "folder/new": "6"},
        ),
        ({"a": "new", ".wh.a": ""}, {**BELOW, "a": "new"}),
        ({"lib/f": "7"}, {**BELOW, "usr/lib/f": "7"}),
        ({"lib/.wh.e": ""}, {path: text for path, text in BELOW.items() if path != "usr/lib/e"}),
        (
            {"folder": "file"},
            {**{path: text for path, text in BELOW.items() if "folder" not in path}, "folder": "file"},
        ),
        ({"g": "=>folder/b"}, {**BELOW, "g": "2"}),
        ({"./h": "8", "other": None}, {**BELOW, "h": "8"}),
    ],
)
def test_layers_are_applied(tmp_path: Path, above: dict[str, str | None], left: dict[str, str]) -> None:
    write_image(tmp_path / "image", [tar_of(BELOW), tar_of(above)])
    assert content_of(unpacked(tmp_path / "image", tmp_path / "cache").root) == left


def test_links_stay_within_the_image(tmp_path: Path) -> None:
    """Folders that are links are followed as the image's own processes would, so nothing is written beside it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    layers = [tar_of({"up": "->../../../../..", "far": f"->{outside}"}), tar_of({"up/x": "1", "far/y": "2"})]
    write_image(tmp_path / "image", layers)
    root = unpacked(tmp_path / "image", tmp_path / "cache").root
    assert not list(outside.iterdir()) and (root / "x").read_text() == "1"
    assert (root / str(outside).lstrip("/") / "y").read_text() == "2"


def test_owners_may_write_and_nobody_more(tmp_path: Path) -> None:
    write_image(tmp_path / "image", [tar_of({"a": "1"}, mode=0o6511)])
    assert (unpacked(tmp_path / "image", tmp_path / "cache").root / "a").stat().st_mode & 0o7777 == 0o711


def test_the_configuration_is_kept(tmp_path: Path) -> None:
    write_image(tmp_path / "image", [tar_of({"a": "1"})], ["A=b=c"])
    for _ in range(2):  # the second time from the cache
        found = unpacked(tmp_path / "image", tmp_path / "cache")
        assert (found.variables, found.folder) == ({"A": "b=c"}, "/repo")


def test_a_tar_file_is_read_like_a_folder(tmp_path: Path) -> None:
    write_image(tmp_path / "image", [tar_of(BELOW)])
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(tmp_path / "image", ".")
    assert content_of(unpacked(tmp_path / "image.tar", tmp_path / "cache").root) == BELOW


def test_processes_unpack_an_image_once(tmp_path: Path) -> None:
    write_image(tmp_path / "image", [tar_of({"a": "1"})])
    code = f"""
import logging; logging.basicConfig(level=20)
from pathlib import Path
from typing import Any
from roll.agents.containers.unpacked import unpacked
unpacked(Path({str(tmp_path / "image")!r}), Path({str(tmp_path / "cache")!r}))
"""
    words = [sys.executable, "-c", code]
    started = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=limits.PROCESS)[1] for process in started]
    assert not any(process.returncode for process in started), said
    assert sum("unpacking an image" in text for text in said) == 1


def changed(image: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((image / "index.json").read_text())
    change(index)
    (image / "index.json").write_text(json.dumps(index))


def blob(image: Path, most: bool) -> Path:
    """Return the largest or the smallest blob."""
    return sorted((image / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)[-1 if most else 0]


def cut_off(image: Path) -> None:
    layer = blob(image, most=True)
    os.truncate(layer, layer.stat().st_size - 1)


@pytest.mark.parametrize(
    ("spoil", "code", "value"),
    [
        (lambda image: (image / "index.json").unlink(), "unreadable", "index.json"),
        (lambda image: (image / "index.json").write_text("[]"), "malformed", "index.json"),
        (lambda image: (image / "index.json").write_text("{"), "malformed", "index.json"),
        (lambda image: changed(image, lambda index: index.clear()), "malformed", "manifests"),
        (lambda image: changed(image, lambda index: index.update(manifests=[])), "unfit", "linux/amd64"),
        (
            lambda image: changed(image, lambda index: index["manifests"].append(index["manifests"][0])),
            *("not_allowed", "2 images"),
        ),
        (
            lambda image: changed(
                image,
                lambda index: index["manifests"][0].update(platform={"os": "linux", "architecture": "s390x"}),
            ),
            *("unfit", "0 images"),
        ),
        (
            lambda image: changed(image, lambda index: index["manifests"][0].update(digest="sha256:../../x")),
            *("malformed", "../../x"),
        ),
        (cut_off, "malformed", "SHA-256"),
        (lambda image: blob(image, most=False).write_text("{}"), "malformed", "SHA-256"),
        (lambda image: blob(image, most=True).unlink(), "unreadable", "blobs/sha256"),
    ],
)
def test_a_spoilt_image_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], code: FaultCode, value: str
) -> None:
    image = tmp_path / "image"
    write_image(image, [tar_of({f"file{number}": os.urandom(40).hex() for number in range(20)})])
    spoil(image)
    with pytest.raises(BadImage) as caught:
        unpacked(image, tmp_path / "cache")
    assert (caught.value.code, value in caught.value.problem) == (code, True), caught.value
    assert not list((tmp_path / "cache").glob("sha256*/")), "a partly unpacked image is left"


@pytest.mark.parametrize(
    ("entries", "value"),
    [
        ({"../x": "1"}, "../x"),
        ({"a/../../x": "1"}, "a/../../x"),
        ({"a": "=>../../etc/passwd"}, "../../etc/passwd"),
        ({"a": "=>missing"}, "missing"),
        ({"a": "->b", "b": "->a", "a/c": "1"}, "symbolic links"),
    ],
)
def test_a_layer_that_leads_elsewhere_is_refused(tmp_path: Path, entries: dict[str, str | None], value: str) -> None:
    write_image(tmp_path / "image", [tar_of(entries)])
    with pytest.raises(BadImage, match=value) as caught:
        unpacked(tmp_path / "image", tmp_path / "cache")
    assert caught.value.code == "malformed"


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, code in (("missing", "not_found"), ("text", "unreadable")):
        (tmp_path / "text").write_text("no tar file" * 100)
        with pytest.raises(BadImage) as caught:
            unpacked(tmp_path / name, tmp_path / "cache")
        assert caught.value.code == code
