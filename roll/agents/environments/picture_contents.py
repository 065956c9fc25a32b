"""Pictures in the messages of environments and in the answers of tools: in any form that rows have, or as an object of
Pillow. They pass from process to process as the bytes of a file in base64, which was read where it was shown.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from roll.data.messages import text_of
from roll.data.picture_files import check_shape, decoded, read_bytes
from roll.data.picture_parts import PLACES, PictureFault, is_picture, reference_of

BLIND = (
    "shows a picture, but the policy sees none: use a model that sees pictures, and set model_args.sees_pictures of "
    "actor_train, actor_infer and reference if it sees them only when asked"
)
"""Continues the name of what shows a picture to a policy that sees none."""
MOST_BYTES = 24 << 20
"""Largest size of a picture's file in bytes."""
WRITTEN = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of Pillow that a PNG can have."""
Part = Mapping[str, Any]


def is_shown(value: Any) -> bool:
    """Whether a value is a picture by itself, or a part of a content that shows one."""
    return isinstance(value, Image.Image | bytes | bytearray) or is_picture(value)


def file_of(value: Any) -> bytes:
    """Return the bytes of the file of a picture, for which `is_shown` is true; a relative path starts at the folder of
    this process.

    Raises:
        PictureFault: there is no such file, or it cannot be used as a picture (see `decoded`).
    """
    given = [value.get(key) for key in PLACES] if isinstance(value, Mapping) else [value]
    held = next((one for one in given if isinstance(one, Image.Image | bytes | bytearray)), None)
    if isinstance(held, Image.Image):
        data = _png(held)
    elif held is not None:
        data = bytes(held)
    elif (reference := reference_of(value)) is not None:
        data, _ = read_bytes(reference, Path.cwd())
    else:
        raise PictureFault("does not say where it is")
    if len(data) > MOST_BYTES:
        problem = f"has a file of {len(data):,} bytes, more than {MOST_BYTES:,}"
        raise PictureFault(problem, "make it smaller", "too_large")
    decoded(data)
    return data


def _png(picture: Image.Image) -> bytes:
    """Return an object of Pillow as a PNG. Its pixels are shown as they are. Raises PictureFault as `decoded` does."""
    check_shape(picture)
    file = io.BytesIO()
    try:
        if picture.mode in WRITTEN:
            picture.save(file, "png")
        else:
            picture.convert("RGBA" if picture.has_transparency_data else "RGB").save(file, "png")
    except Exception as error:  # Pillow's readers raise anything for a broken file
        raise PictureFault(f"cannot be read as a picture: {error}", code="unreadable") from error
    return file.getvalue()


def file_part(data: bytes) -> Part:
    """Return the part of a content that shows the picture of a file."""
    return {"type": "image", "base64": base64.b64encode(data).decode()}


def file_in(part: Part) -> bytes:
    """Return the bytes in a part of `file_part`. Raises PictureFault for any other part."""
    text = part.get("base64")
    if set(part) != {"type", "base64"} or not isinstance(text, str):
        raise PictureFault(f"is not given as a file in base64: {dict(part)!r:.60}")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise PictureFault(f"is not base64: {error}") from error


def content_of(values: Sequence[Any]) -> list[Part]:
    """Return texts, parts with a text, and pictures as the parts of a content.

    Raises:
        PictureFault: a picture cannot be used.
        MessageFault: a value is neither a text nor a picture.
    """
    return [
        file_part(file_of(value))
        if is_shown(value)
        else {"type": "text", "text": value if isinstance(value, str) else text_of([value])}
        for value in values
    ]
