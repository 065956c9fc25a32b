"""What a policy sees of the pictures in its episodes: placeholders for the trainer, files for the engine.

message ──▶ EpisodeSight.read ──▶ message without files ──▶ renderer ──▶ tokens, one for each picture ──▶ engine
                             └──▶ files, expansions     ──▶ renderer ──▶ tokens, all placeholders   ──▶ trainer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from roll.agents.environments.base import Message
from roll.agents.environments.picture_contents import file_in, file_part
from roll.data.native import TemplateFault
from roll.data.picture_files import decoded, digest_of
from roll.data.picture_parts import PictureFault, is_picture
from roll.data.pictures import Sight
from roll.data.renderers.base import ChatRenderer, Expansions, SeeingRenderer
from roll.errors import EnvironmentFailed
from roll.types import AskedPictures, Ints, Pictures, PromptPictures


@dataclass(frozen=True)
class SeenPicture:
    """A picture in the messages of an episode."""

    name: str
    """The XXH3 hash of its file, in hexadecimal digits."""
    file: bytes
    expansion: str
    """The text with its placeholders."""


class SeenMessages(NamedTuple):
    """Messages without the files of their pictures, each of which has a name instead."""

    messages: list[Message]
    pictures: tuple[SeenPicture, ...]
    tool_errors: int = 0
    """Number of tools whose picture the model cannot see. Their messages say so to the policy."""


class GivenTokens(NamedTuple):
    """Tokens of the same text."""

    token_ids: Ints
    """With as many placeholders as the model needs."""
    asked_ids: Ints
    """With a single placeholder for each picture."""


class EpisodeSight:
    """How the policy sees the pictures of episodes. Without a picture, tokens are those of the renderer."""

    def __init__(self, sight: Sight, renderer: SeeingRenderer, mark_id: int) -> None:
        """`mark_id` is the token that the template writes once for each picture."""
        self._sight, self._renderer, self._mark_id = sight, renderer, mark_id

    @property
    def unwritable(self) -> frozenset[int]:
        """Return the tokens that would stand for a picture if the policy wrote them. They end its turn, and are cut off
        it.
        """
        return frozenset({self._sight.token_id, self._mark_id})

    def read(self, messages: Sequence[Message]) -> SeenMessages:
        """Return messages of an environment and their pictures, which are read by the model's processor.

        Raises:
            EnvironmentFailed: the model cannot see a picture that no tool shows.
        """
        told: list[Message] = []
        pictures: list[SeenPicture] = []
        errors = 0
        for message in messages:
            try:
                seen = self._pictures(message)
            except PictureFault as fault:
                if message["role"] != "tool":
                    raise EnvironmentFailed(f"a picture of the environment {fault}; {fault.remedy}") from fault
                told.append({**message, "content": f"Error: the picture {fault}"})
                errors += 1
                continue
            told.append(_named(message, iter(seen)) if seen else message)
            pictures += seen
        return SeenMessages(told, tuple(pictures), errors)

    def _pictures(self, message: Message) -> list[SeenPicture]:
        parts = message["content"] if isinstance(message.get("content"), list) else ()
        return [self._picture(file_in(part)) for part in parts if is_picture(part)]

    def _picture(self, file: bytes) -> SeenPicture:
        return SeenPicture(f"{digest_of(file) % (1 << 64):016x}", file, self._sight.expansion(decoded(file)))

    def tokens(
        self, write: Callable[[ChatRenderer], Ints | None], pictures: Sequence[SeenPicture]
    ) -> GivenTokens | None:
        """Return the tokens that `write` renders with pictures, or None if `write` returns None.

        Raises:
            TemplateFault: the template does not write each picture once.
        """
        if (asked := write(self._renderer)) is None:
            return None
        if (written := int((asked == self._mark_id).sum())) != len(pictures):
            raise TemplateFault(f"it writes {written} times {self._sight.token} for {len(pictures)} picture(s)")
        if not pictures:
            return GivenTokens(asked, asked)
        expansions = Expansions(self._sight.token, tuple(picture.expansion for picture in pictures))
        whole = write(self._renderer.showing(expansions))
        return None if whole is None else GivenTokens(whole, asked)

    def shown(self, token_ids: Ints, asked_ids: Ints, pictures: Sequence[SeenPicture]) -> PromptPictures | None:
        """Return the pictures of a context for the engine, and for the trainer; None without any.

        Args:
            token_ids: [C], the context with as many placeholders as the model needs.
            asked_ids: [U], the context with a single placeholder for each picture.
        """
        if not pictures:
            return None
        files, names = tuple(picture.file for picture in pictures), tuple(picture.name for picture in pictures)

        def pixels() -> Pictures:
            found = self._sight.placed(self._sight.pixels([*map(decoded, files)]), token_ids)
            assert found is not None, f"the placeholders of an episode do not fit its pictures {', '.join(names)}"
            return found

        return PromptPictures(names, lambda: AskedPictures(asked_ids, files, names), pixels)


def _named(message: Message, pictures: Iterator[SeenPicture]) -> Message:
    """Return a message with the names of its pictures in the place of their files."""
    content = message["content"]
    named = [{"type": "image", "path": next(pictures).name} if is_picture(part) else part for part in content]
    return {**message, "content": named}


def told_text(message: Message) -> str:
    """Return the text of a message, with the name of each picture, by which pictures differ."""
    content = message.get("content")
    if not isinstance(content, list):
        return str(content or "")
    return "".join(f"[picture {part['path']}]" if is_picture(part) else part["text"] for part in content)


def row_with_files(row: Mapping[str, Any], files: Sequence[bytes]) -> Mapping[str, Any]:
    """Return the row of an environment with the files of its pictures, whatever says where they are.

    Args:
        files: the files of the pictures in the row's messages, in their order.

    Raises:
        EnvironmentFailed: the row's messages do not have a part for each picture.
    """
    left = iter(files)
    filled = {key: _filled(value, left) for key, value in row.items()}
    parts = sum(is_picture(part) for value in row.values() for part in _contents(value))
    if parts != len(files):
        problem = f"the row's messages have {parts} parts that show a picture, and the row has {len(files)} picture(s)"
        raise EnvironmentFailed(f"{problem}; write each picture as a part of a message")
    return filled


def _contents(value: Any) -> Iterator[Any]:
    """Yield the parts of the contents of messages, if the value is a list of messages."""
    for message in value if isinstance(value, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, list) else ()


def _filled(value: Any, files: Iterator[bytes]) -> Any:
    """Return a list of messages with files in its parts; other values unchanged."""
    if not any(map(is_picture, _contents(value))):
        return value
    return [_with_files(message, files) for message in value]


def _with_files(message: Any, files: Iterator[bytes]) -> Any:
    if not any(map(is_picture, _contents([message]))):
        return message
    parts = [file_part(next(files, b"")) if is_picture(part) else part for part in message["content"]]
    return {**message, "content": parts}
