"""Tells whether a model is the same on several hosts, without reading all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash
from huggingface_hub import try_to_load_from_cache

PIECE = 1 << 20
"""Bytes that are read at the begin, in the middle and at the end of a file."""
COMMIT = "commit"
"""Key of a Hub model's commit."""


def model_print(model: str) -> dict[str, str]:
    """Return the print of each file of a model's folder, or of a Hub model the commit in this host's cache.

    Two files with equal prints have the same size and the same bytes in three places. A Hub model that is not in the
    cache yet has an empty print, like a folder that does not exist.
    """
    folder = Path(model)
    if folder.is_absolute():
        return {str(path.relative_to(folder)): file_print(path) for path in sorted(_files(folder))}
    cached = try_to_load_from_cache(model, "config.json")
    return {COMMIT: Path(cached).parent.name} if isinstance(cached, str) else {}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def file_print(path: Path) -> str:
    """Return the size and a hash of three pieces of a file; empty if it cannot be read."""
    try:
        size = path.stat().st_size
        digest = xxhash.xxh3_64()
        with path.open("rb") as stream:
            for start in sorted({0, max(size // 2 - PIECE // 2, 0), max(size - PIECE, 0)}):
                stream.seek(start)
                digest.update(stream.read(PIECE))
    except OSError:
        return ""
    return f"{size} bytes, {digest.hexdigest()}"


def difference(own: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return how the prints of a model on another host differ from the driver's, None if they do not."""
    if not other and own.keys() != {COMMIT}:
        return "is not there" if own else None
    if COMMIT in own and COMMIT in other and own != other:
        return f"is commit {other[COMMIT]}, and on the driver's host {own[COMMIT]}"
    if missing := sorted(own.keys() - other.keys() - {COMMIT}):
        return f"lacks {', '.join(missing[:3])}"
    different = sorted(name for name in own.keys() & other.keys() if own[name] != other[name])
    return f"has another {', '.join(different[:3])}" if different else None
