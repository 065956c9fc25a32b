"""What models that compute rewards see of the pictures of a prompt: data: URLs, or tokens with files or pixels."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from PIL import Image

from roll.data.chat import Render
from roll.data.picture_files import data_url, decoded, digest_of
from roll.data.picture_parts import MARK, PICTURES, PictureFault, PictureReference
from roll.data.pictures import Sight, expanded
from roll.data.rows import Conversation
from roll.rewards.judges.reward_models import EncodedMessage
from roll.types import AskedPictures, Ints, Pictures, Prompt


def shown_urls(prompt: Prompt) -> tuple[str, ...]:
    """Return the pictures of a prompt as data: URLs. Raises DataError if the file of one has changed."""
    return tuple(map(data_url, prompt.shown.asked().files)) if prompt.shown else ()


class AnsweredEncoder(Protocol):
    """See `answered_encoder`."""

    def __call__(self, conversation: Conversation, response: str, change: Callable[[str], str] = ...) -> Ints:
        """Return the tokens of a conversation with its response."""
        ...


class SeeingScorerEncoder:
    """Converts a conversation and its response to the input of a reward model that sees pictures."""

    def __init__(self, answered: AnsweredEncoder, sight: Sight) -> None:
        self._answered, self._sight = answered, sight
        self._seen = lru_cache(maxsize=1)(self._read)
        self._last: Pictures | None = None

    def __call__(
        self, conversation: Conversation, files: tuple[bytes, ...], response: str
    ) -> tuple[Ints, Pictures | None]:
        """Return the tokens, and the pictures. Responses to one prompt that follow each other share its pixels.

        Args:
            conversation: messages whose texts have `MARK` for each picture.
            files: the files of the pictures, in the order of their marks.

        Raises:
            TemplateFault: the template rejects the conversation.
            PictureFault: the model cannot see a picture, or a text has the placeholder of pictures.
        """
        expansions, pixels = self._seen(files)
        marked = [message | _references(message["content"].count(MARK)) for message in conversation]

        def with_placeholders(prompt: str) -> str:
            if prompt.count(self._sight.token) != len(files):
                raise _other_count(prompt, self._sight, len(files))
            return expanded([prompt], self._sight.token, expansions)[0]

        tokens = self._answered(marked, response, with_placeholders)
        if pixels is None:
            # Without this check, the features of other sequences of a micro-batch would not fit the placeholders.
            if self._sight.token_id in tokens:
                raise _other_count(response, self._sight, 0)
            return tokens, None
        found = self._sight.placed(pixels, tokens)
        if found is None:
            raise _other_count(response, self._sight, 0)
        last = self._last
        if last is None or last.values is not found.values or not np.array_equal(last.starts, found.starts):
            self._last = last = found
        return tokens, last

    def _read(self, files: tuple[bytes, ...]) -> tuple[list[str], tuple[np.ndarray, np.ndarray, np.ndarray] | None]:
        """Return the expansion of each picture, and the pixels of all; None without any."""
        pictures = [*map(decoded, files)]
        return [self._sight.expansion(one) for one in pictures], self._sight.pixels(pictures) if pictures else None


def _references(pictures: int) -> dict[str, tuple[PictureReference, ...]]:
    """Return the key by which a template writes the marks of a message as pictures."""
    return {PICTURES: (PictureReference(),) * pictures} if pictures else {}


def _other_count(text: str, sight: Sight, pictures: int) -> PictureFault:
    problem = f"has {text.count(sight.token)} times {sight.token} for {pictures} picture(s)"
    return PictureFault(problem, "use a template that writes each picture once", "contradiction")


def trial_picture() -> bytes:
    """Return the file of a black picture, with which the template and the processor of a model are tried."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "png")
    return file.getvalue()


def seeing_encoder(
    render: Render, tokens: Callable[[str], Ints], sight: Sight
) -> Callable[[str, Sequence[str]], EncodedMessage]:
    """Return the function that converts a user's message, after the pictures in data: URLs, to the input of a model.

    It raises TemplateFault if the template rejects one, and PictureFault if the model cannot see a picture, or if the
    message has the placeholder of pictures in its text.

    Args:
        tokens: returns the tokens of a rendered text.
    """

    def encode(message: str, pictures: Sequence[str]) -> EncodedMessage:
        files = tuple(base64.b64decode(url.partition(",")[2]) for url in pictures)
        given = {"role": "user", "content": MARK * len(files) + message.replace(MARK, "")}
        text = render([given | _references(len(files))], True)
        if text.count(sight.token) != len(files):
            raise _other_count(text, sight, len(files))
        (whole,) = expanded([text], sight.token, [sight.expansion(decoded(file)) for file in files])
        if not files:
            return tokens(whole), None
        names = tuple(f"{digest_of(file) % (1 << 64):016x}" for file in files)
        asked = AskedPictures(tokens(text).astype(np.int32), files, names)
        return tokens(whole).astype(np.int32), asked

    return encode
