"""Makes layers of images from short descriptions, and reads what unpacking made of them."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

LINKS = {"->": tarfile.SYMTYPE, "=>": tarfile.LNKTYPE}
"""Beginnings of contents that are links: symbolic ones, and hard ones."""


def tar_of(entries: Mapping[str, str | None], mode: int = 0o644) -> bytes:
    """Return a tar file. A content of None makes a folder; one that begins with a key of LINKS, a link."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.mode = mode
            if content is None:
                member.type = tarfile.DIRTYPE
            elif content[:2] in LINKS:
                member.type, member.linkname = LINKS[content[:2]], content[2:]
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO((content or "").encode()) if member.isreg() else None)
    return packed.getvalue()


def content_of(root: Path) -> dict[str, str]:
    """Return the files of a folder by path, symbolic links with the mark `->` and their target."""
    found = {}
    for folder, names, files in os.walk(root):
        for name in (*files, *(one for one in names if (Path(folder) / one).is_symlink())):
            path = Path(folder) / name
            found[str(path.relative_to(root))] = f"->{os.readlink(path)}" if path.is_symlink() else path.read_text()
    return found
