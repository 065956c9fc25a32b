"""Pictures in messages: reads the parts of a content that show one, and where the picture is. Pure functions.

A picture is given as a path, as bytes in base64, or as a `data:` URL, in the formats of OpenAI, transformers and
`datasets`. In the text of a message, `MARK` stands for it, and the message's `pictures` have its reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlparse

from roll.errors import FaultCode

MARK = "\ufdd0"
"""Stands for a picture in the text of a message. Unicode reserves this code for internal use, so no text has it."""
PICTURES = "pictures"
"""Key of a message with the references of its pictures, in the order of its marks."""
KINDS = ("image", "image_url", "input_image")
"""Types of parts that show a picture."""
PLACES = ("image", "image_url", "url", "path", "base64", "bytes")
"""Keys of a part, or of an object of a column, that say where the picture is."""
LABEL = "<image>"
"""What the texts of other frameworks' rows have where a picture of the column belongs."""
SIZES = "picture_sizes"
"""Column with the width and height, in pixels, of each picture of a row as the model sees it."""
REMEDY = "give a path, a data: URL, or an object with `path` or `bytes` (base64)"


@dataclass(frozen=True)
class PictureReference:
    """Where a picture is. One of the two is not empty."""

    path: str = ""
    """Path of a file. A relative one starts at the folder of the rows' file."""
    encoded: str = ""
    """The bytes of a file, in base64."""


class PictureFault(ValueError):
    """A picture that cannot be used. `str()` continues the name of the picture."""

    def __init__(self, problem: str, remedy: str = REMEDY, code: FaultCode = "malformed") -> None:
        super().__init__(problem)
        self.remedy = remedy
        self.code: FaultCode = code


def is_picture(part: Any) -> bool:
    """Whether a part of a content shows a picture."""
    return isinstance(part, Mapping) and part.get("type") in KINDS


def reference_of(given: Any) -> PictureReference | None:
    """Return where a picture is: of a part of a content, or of an element of a column. None if it does not say.

    Raises:
        PictureFault: it is on another host, it is a video, or nothing says where it is in a form that roll reads.
    """
    if given is None:
        return None
    if isinstance(given, str):
        return _of_text(given)
    if not isinstance(given, Mapping):
        raise PictureFault(f"is a {type(given).__name__}, not a picture: {given!r:.60}")
    found = {key: given[key] for key in PLACES if given.get(key) not in (None, "")}
    if encoded := found.get("bytes") or found.get("base64"):  # with `datasets`, the path then only has the file's name
        if not isinstance(encoded, str):
            raise PictureFault(f"has a {type(encoded).__name__} where its bytes belong: {encoded!r:.60}")
        return _of_data(encoded) if encoded.startswith("data:") else PictureReference(encoded=encoded)
    if len(found) > 1:
        raise PictureFault(f"says in {' and '.join(found)} where it is", "keep one of the keys", "contradiction")
    return reference_of(next(iter(found.values()))) if found else None


def _of_text(text: str) -> PictureReference:
    if text.startswith("data:"):
        return _of_data(text)
    url = urlparse(text) if "://" in text else None
    if url is None:
        return PictureReference(path=text)
    if url.scheme != "file" or url.netloc not in ("", "localhost"):
        problem = f"is at {text!r:.60}, and roll does not read pictures from other hosts"
        raise PictureFault(problem, "download it, and give its path", "not_supported")
    return PictureReference(path=unquote(url.path))


def _of_data(text: str) -> PictureReference:
    head, comma, encoded = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PictureFault(f"is a data: URL without base64: {text!r:.60}", "write data:image/png;base64,...")
    if not head.startswith("data:image/"):
        raise PictureFault(f"is a data: URL of another kind: {head!r:.60}", "give a picture", "not_supported")
    return PictureReference(encoded=encoded)


def without_bytes(given: Any) -> Any:
    """Return messages, or the value of a column of pictures, without the bytes of pictures.

    Of a `data:` URL only the type is left, and `bytes` and `base64` become None.
    """
    if isinstance(given, str):
        return given.partition(",")[0] if given.startswith("data:image/") else given
    if isinstance(given, Mapping):
        return {key: None if key in ("bytes", "base64") else without_bytes(value) for key, value in given.items()}
    return [*map(without_bytes, given)] if isinstance(given, list) else given


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> tuple[PictureReference, ...]:
    """Return the references of all pictures of a conversation, in order."""
    return tuple(reference for message in messages for reference in message.get(PICTURES, ()))


def parts_of(text: str) -> list[dict[str, str]]:
    """Return a text with marks as the parts that chat templates read."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
    return parts


def with_column(
    conversation: Sequence[dict[str, Any]], given: Sequence[PictureReference], has_labels: bool
) -> list[dict[str, Any]]:
    """Return a conversation with the pictures of a row's column in place.

    They fill, in order, the parts that do not say where their picture is and, with `has_labels`, each `<image>` in
    the text of a message that is not the assistant's. If there are no such places, all stand before the first
    message of the user.

    Args:
        conversation: messages, whose `PICTURES` have None for a part that does not say where its picture is.
        given: the pictures of the column.

    Raises:
        PictureFault: there are more or fewer pictures than places.
    """
    messages = [_labelled(message) if has_labels else message for message in conversation]
    open_places = sum(reference is None for message in messages for reference in message.get(PICTURES, ()))
    if given and not any(PICTURES in message for message in messages):
        first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
        if first is not None:
            shown = {"content": MARK * len(given) + messages[first]["content"], PICTURES: (None,) * len(given)}
            messages[first], open_places = {**messages[first], **shown}, len(given)
    if open_places != len(given):
        what = f"have {open_places} place(s) for pictures that do not say which, and the row gives {len(given)}"
        remedy = "give a picture for each place, in data_args.images or in the part itself"
        raise PictureFault(what, remedy, "contradiction")
    left = iter(given)
    return [
        {**message, PICTURES: tuple(next(left) if one is None else one for one in message[PICTURES])}
        if PICTURES in message
        else message
        for message in messages
    ]


def _labelled(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with marks in place of `<image>`."""
    text = message["content"]
    if message["role"] == "assistant" or LABEL not in text:
        return message
    own = iter(message.get(PICTURES, ()))
    pieces = text.split(LABEL)
    references: list[PictureReference | None] = []
    for number, piece in enumerate(pieces):
        references += [None] * (number > 0) + [next(own) for _ in range(piece.count(MARK))]
    return {**message, "content": MARK.join(pieces), PICTURES: tuple(references)}
