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
from roll.data.picture_parts import MARK, PICTURES, PictureFault, PictureReference
from roll.data.pictures import Sight, data_url, decoded, digest_of, expanded
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


def seeing_scorer_encoder(
    answered: AnsweredEncoder, sight: Sight
) -> Callable[[Conversation, tuple[bytes, ...], str], tuple[Ints, Pictures]]:
    """Return the function that converts a conversation with marks, the files of its pictures and a response to a
    model's input.

    It raises TemplateFault if the template rejects the conversation, and PictureFault if the model cannot see a
    picture, or if a text has the placeholder of pictures. Responses to one prompt after each other share its pixels.
    """

    @lru_cache(maxsize=1)
    def seen(files: tuple[bytes, ...]) -> tuple[list[str], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        pictures = [*map(decoded, files)]
        return [sight.expansion(picture) for picture in pictures], sight.pixels(pictures)

    last: list[Pictures] = []

    def encode(conversation: Conversation, files: tuple[bytes, ...], response: str) -> tuple[Ints, Pictures]:
        expansions, pixels = seen(files)
        marked = [
            message | ({PICTURES: (PictureReference(),) * marks} if (marks := message["content"].count(MARK)) else {})
            for message in conversation
        ]

        def with_placeholders(prompt: str) -> str:
            if prompt.count(sight.token) != len(expansions):
                raise _other_count(prompt, sight, len(expansions))
            return expanded([prompt], sight.token, expansions)[0]

        tokens = answered(marked, response, with_placeholders)
        found = sight.placed(pixels, tokens)
        if found is None:
            raise _other_count(response, sight, 0)
        if last and last[0].values is found.values and np.array_equal(last[0].starts, found.starts):
            return tokens, last[0]
        last[:] = [found]
        return tokens, found

    return encode


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
        shown = {PICTURES: (PictureReference(),) * len(files)} if files else {}
        text = render([given | shown], True)
        if text.count(sight.token) != len(files):
            raise _other_count(text, sight, len(files))
        (whole,) = expanded([text], sight.token, [sight.expansion(decoded(file)) for file in files])
        if not files:
            return tokens(whole), None
        names = tuple(f"{digest_of(file) % (1 << 64):016x}" for file in files)
        asked = AskedPictures(tokens(text).astype(np.int32), files, names)
        return tokens(whole).astype(np.int32), asked

    return encode
