"""Unpacks images once per host: their layers become one folder, which all containers share and none can change.

Layers are applied as the OCI image specification 1.1 (layer.md) says: a file `.wh.NAME` removes NAME of the layers
below, and `.wh..wh..opq` all that those have in its folder.

All files belong to one user, and have no capabilities and no set-user-ID bits. Devices are left out.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from roll.agents.containers.layout import BadImage, ImageManifest, Layer, Layout
from roll.rewards.sandbox.inside.confine import UNPRIVILEGED
from roll.system.own_folder import LockHeld, holding_lock, new_folder

LOG = logging.getLogger(__name__)
ROOT, SCRATCH, RECORD = "root", "scratch", "image.json"
"""In the folder of an image: its files, an empty folder to mount on, and its variables and working folder."""
UNPACK_SECONDS = 3600.0
"""Longest wait for another process that unpacks the same image."""
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
MOST_LINKS = 40
"""Largest number of symbolic links in one path, as in Linux."""
ZSTD = "export it with gzip: `skopeo copy --dest-compress-format gzip --dest-compress oci:OLD oci:NEW`"


@dataclass(frozen=True)
class UnpackedImage:
    """An image whose files are ready."""

    root: Path
    """Its files."""
    scratch: Path
    """An empty folder on which each container mounts its own changes."""
    variables: dict[str, str]
    folder: str
    """Working folder of its processes."""


def unpacked(image: Path, cache: Path) -> UnpackedImage:
    """Return an image, after it was unpacked if no process of this host has done so. Blocks meanwhile.

    Raises:
        BadImage: the image cannot be read, is malformed, or the cache cannot be written.
    """
    with Layout(image) as layout:
        manifest = layout.manifest()
        folder = cache.expanduser().absolute() / manifest.digest.replace(":", "-")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not (folder / RECORD).is_file():
                with holding_lock(folder.with_name(f"{folder.name}.lock"), UNPACK_SECONDS):
                    if not (folder / RECORD).is_file():
                        _unpack(layout, manifest, folder)
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except LockHeld as error:
            problem = f"another process has been unpacking {image} for {UNPACK_SECONDS:g} s"
            raise BadImage(problem, f"end the process that holds {error}", "timed_out") from error
        except OSError as error:
            problem = f"{image} cannot be unpacked into {folder}: {error}"
            raise BadImage(problem, "set container.cache to a folder with enough space", "not_writable") from error
    return UnpackedImage(folder / ROOT, folder / SCRATCH, record["variables"], record["folder"])


def _unpack(layout: Layout, manifest: ImageManifest, folder: Path) -> None:
    LOG.info("unpacking an image of %d layers into %s", len(manifest.layers), folder)
    with new_folder(folder) as partial:
        root = partial / ROOT
        root.mkdir(parents=True)
        (partial / SCRATCH).mkdir()
        for layer in manifest.layers:
            apply_layer(root, lambda layer=layer: _opened(layout, layer))
        for name in ("dev", "proc", "tmp"):
            (root / name).mkdir(exist_ok=True)
        if os.geteuid() == 0:
            give_away(root)
        record = {"variables": manifest.variables, "folder": manifest.folder}
        (partial / RECORD).write_text(json.dumps(record), encoding="utf-8")


@contextmanager
def _opened(layout: Layout, layer: Layer) -> Iterator[tarfile.TarFile]:
    """A context with an open layer, which is read from its beginning to its end."""
    with layout.open_blob(layer.digest) as blob, decompressed(layer, blob) as file:
        try:
            with tarfile.open(fileobj=file, mode="r|") as archive:
                yield archive
        except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
            problem = f"the layer {layer.digest} ({layer.media_type}) cannot be read: {error}"
            raise BadImage(problem, "export the image again", "unreadable") from error


def decompressed(layer: Layer, blob: IO[bytes]) -> IO[bytes]:
    """Return the tar file of a layer. Raises BadImage if its compression is not known."""
    kind = layer.media_type.rpartition("+")[2] if "+" in layer.media_type else layer.media_type.rpartition(".")[2]
    if kind == "gzip":
        return cast(IO[bytes], gzip.open(blob))
    if kind == "tar":
        return blob
    raise BadImage(f"the layer {layer.digest} has the media type {layer.media_type}", ZSTD, "not_supported")


def apply_layer(root: Path, opened: Callable[[], Any]) -> None:
    """Apply a layer to the files of those below it.

    It is read twice, because its whiteouts remove nothing of the layer itself, wherever they stand in it.

    Args:
        opened: returns a context with the layer's tar file.

    Raises:
        BadImage: the layer cannot be read, or has a path that leads out of the image.
        OSError: a file cannot be written.
    """
    with opened() as archive:
        for member in archive:
            place, name = _split(member)
            if name == OPAQUE:
                _empty(_resolved(root, place))
            elif name.startswith(WHITEOUT):
                _remove(_resolved(root, place) / name.removeprefix(WHITEOUT))
    with opened() as archive:
        for member in archive:
            place, name = _split(member)
            if name and not name.startswith(WHITEOUT):
                _extract(root, archive, member, _resolved(root, place) / name)


def _split(member: tarfile.TarInfo) -> tuple[list[str], str]:
    """Return the folders and the last part of a member's path; an empty last part for the root."""
    parts = _parts(member.name)
    return parts[:-1], parts[-1] if parts else ""


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadImage(f"a layer has the path '{path:.200}'", "export the image again", "malformed")
    return parts


def _resolved(root: Path, parts: list[str]) -> Path:
    """Return a folder of the image. Symbolic links are followed within the image, as its own processes would.

    Raises:
        BadImage: more than MOST_LINKS links lead on.
    """
    at, waiting, links = root, list(reversed(parts)), 0
    while waiting:
        part = waiting.pop()
        if part in ("", "."):
            continue
        if part == "..":
            at = at.parent if at != root else root
            continue
        inner = at / part
        if not inner.is_symlink():
            at = inner
            continue
        target, links = os.readlink(inner), links + 1
        if links > MOST_LINKS:
            raise BadImage(f"/{'/'.join(parts)} has too many symbolic links", "export the image again", "malformed")
        at = root if target.startswith("/") else at
        waiting += reversed(target.split("/"))
    return at


def _extract(root: Path, archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    # Owners may do everything, as root of a container may; nobody becomes another user.
    mode = stat.S_IMODE(member.mode) & ~(stat.S_ISUID | stat.S_ISGID) | stat.S_IRUSR | stat.S_IWUSR
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.isdir():
        if not path.is_dir() or path.is_symlink():
            _remove(path)
            path.mkdir()
        path.chmod(mode | stat.S_IXUSR)
        return
    if not (member.isreg() or member.issym() or member.islnk()):
        return  # a device or a pipe
    _remove(path)
    if member.issym():
        path.symlink_to(member.linkname)
    elif member.islnk():
        *place, name = _parts(member.linkname)
        linked = _resolved(root, place) / name
        if not linked.is_file() or linked.is_symlink():
            problem = f"a layer has '{member.name:.200}' as a link to '{member.linkname:.200}', which is no file"
            raise BadImage(problem, "export the image again", "malformed")
        os.link(linked, path)
    else:
        content = archive.extractfile(member)
        assert content is not None, member.name
        with path.open("xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
        path.chmod(mode)
        os.utime(path, (member.mtime, member.mtime))  # caches such as Python's check it


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            _remove(path)


def give_away(root: Path) -> None:
    """Give all files to the user that root's containers run as. Root only."""
    for folder, names, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in (*names, *files))):
            os.chown(path, UNPRIVILEGED, UNPRIVILEGED, follow_symlinks=False)
