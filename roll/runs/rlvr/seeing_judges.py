"""What a judge sees of the pictures of a prompt: data: URLs, or tokens and files for a model that the run serves."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from roll.data.chat import Render
from roll.data.picture_parts import MARK, PICTURES, PictureFault, PictureReference
from roll.data.pictures import Sight, data_url, decoded, digest_of, expanded
from roll.rewards.judges.reward_models import EncodedMessage
from roll.types import AskedPictures, Ints, Prompt


def shown_urls(prompt: Prompt) -> tuple[str, ...]:
    """Return the pictures of a prompt as data: URLs. Raises DataError if the file of one has changed."""
    return tuple(map(data_url, prompt.shown.asked().files)) if prompt.shown else ()


def trial_picture() -> str:
    """Return a black picture, with which the template and the processor of a judge are tried."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "png")
    return data_url(file.getvalue())


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
            problem = f"has {text.count(sight.token)} times {sight.token} for {len(files)} picture(s)"
            raise PictureFault(problem, "use a template that writes each picture once", "contradiction")
        (whole,) = expanded([text], sight.token, [sight.expansion(decoded(file)) for file in files])
        if not files:
            return tokens(whole), None
        names = tuple(f"{digest_of(file) % (1 << 64):016x}" for file in files)
        asked = AskedPictures(tokens(text).astype(np.int32), files, names)
        return tokens(whole).astype(np.int32), asked

    return encode
