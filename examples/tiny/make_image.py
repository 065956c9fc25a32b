"""Writes an image of a container, as an OCI layout, from programs of this machine. Nothing is downloaded.

    python examples/tiny/make_image.py FOLDER [--python]

The image has a shell and some of the usual small programs, and with --python this machine's Python with its standard
library. The same machine always writes the same image.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("sh", "cat", "cp", "echo", "head", "ls", "mkdir", "mv", "rm", "sed", "sleep", "tail", "test", "touch", "wc")
PACKED = "application/vnd.oci.image.layer.v1.tar+gzip"
FOLDER = "/repo"
"""Working folder of the image."""
LEFT_OUT = ("ensurepip", "idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tests", "tkinter")
"""Parts of the standard library that no task needs."""


def libraries(program: Path) -> Iterator[Path]:
    """Yield the libraries that a program or a library loads when it starts, with the loader."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    for word in listed.split():
        if word.startswith("/"):
            yield Path(word)


def program_files(names: Sequence[str]) -> dict[str, Path]:
    """Return the files of programs, by their places in the image.

    Raises:
        FileNotFoundError: this machine lacks one.
    """
    found: dict[str, Path] = {}
    for name in names:
        program = shutil.which(name)
        if program is None:
            raise FileNotFoundError(f"this machine has no program '{name}'")
        found[f"usr/bin/{name}"] = Path(program)
        for library in libraries(Path(program)):
            found[str(library).lstrip("/")] = library
    return found


def python_files() -> dict[str, Path]:
    """Return the files of this machine's Python, by their places in the image."""
    program = Path(os.path.realpath(sys.executable))
    found = {str(program).lstrip("/"): program, "usr/bin/python3": program}
    standard = Path(sysconfig.get_path("stdlib"))
    for folder, names, files in os.walk(standard):
        names[:] = sorted(name for name in names if name not in LEFT_OUT)
        found |= {str(Path(folder) / name).lstrip("/"): Path(folder) / name for name in sorted(files)}
    natives = [path for path in found.values() if path.suffix == ".so" or ".so." in path.name]
    for native in (program, *natives):
        found |= {str(library).lstrip("/"): library for library in libraries(native)}
    return found


def layer(files: dict[str, Path], links: dict[str, str]) -> bytes:
    """Return a tar file of the files, of root, and with their times, which Python compares with those in its cache."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for folder in ("tmp", FOLDER.strip("/"), "root"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(member)
        for place, target in sorted(links.items()):
            member = tarfile.TarInfo(place)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        for place, path in sorted(files.items()):
            content = path.read_bytes()
            member = tarfile.TarInfo(place)
            member.size, member.mode = len(content), path.stat().st_mode & 0o755
            member.mtime = int(path.stat().st_mtime)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def write_image(folder: Path, layers: Sequence[bytes], variables: Sequence[str] = ()) -> str:
    """Write an OCI layout of these layers into a new folder, the lowest layer first. Return the image's digest."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    described = [blob(gzip.compress(one, 6, mtime=0), PACKED) for one in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": list(variables), "WorkingDir": FOLDER},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": described,
    }
    entry = blob(json.dumps(manifest).encode(), manifest["mediaType"])
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}), encoding="utf-8")
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}), encoding="utf-8")
    return str(entry["digest"])


def write_machine_image(folder: Path, with_python: bool = False) -> str:
    """Write the image into a new folder, which replaces `folder` once it is complete. Return its digest."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    files = program_files(PROGRAMS) | (python_files() if with_python else {})
    digest = write_image(partial, [layer(files, {"bin": "usr/bin"})])
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)
    return digest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="store_true", help="with this machine's Python")
    given = parser.parse_args()
    print(f"{given.folder}: {write_machine_image(given.folder, given.python)}")
