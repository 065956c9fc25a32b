"""Pictures of environments and tools: every form arrives as a file, what cannot be read is named, and nothing of it
reaches a policy that sees none.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from mcp import Client
from mcp.types import CallToolResult, ImageContent, TextContent
from PIL import Image

from roll.agents.environments.base import Observation, Step
from roll.agents.environments.checked import (
    MOST_SHOWN,
    BadReturn,
    McpServer,
    json_of,
    observation_of,
    reader,
    step_from,
    step_of,
)
from roll.agents.environments.child import Hosted
from roll.agents.environments.picture_contents import file_in, file_of
from roll.agents.environments.process import EnvironmentProcess
from roll.agents.environments.tasks import task_of, with_more
from roll.agents.mcp_tools import McpTools
from roll.agents.tools import MOST_CHARACTERS, Tools
from roll.data.picture_files import decoded
from roll.data.picture_parts import PictureFault
from roll.errors import ConfigError, EnvironmentFailed
from tests import limits
from tests.faults import assert_fault
from tests.unit.environments.running import calls, section
from tests.unit.rewards.running import run

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
PICTURE = Image.fromarray(PIXELS)


def saved(picture: Image.Image = PICTURE, kind: str = "png", **keys: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **keys)
    return file.getvalue()


FILE = saved()
ENCODED = base64.b64encode(FILE).decode()
ANIMATION = saved(PICTURE, "gif", save_all=True, append_images=[Image.new("RGB", (5, 4), "red")])
FORMS: dict[str, Any] = {
    "object of Pillow": {"type": "image", "image": PICTURE},
    "bytes": {"type": "image", "image": FILE},
    "bytes and a name": {"type": "image", "bytes": FILE, "path": "name.png"},
    "base64": {"type": "image", "base64": ENCODED},
    "url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED}"}},
    "path": {"type": "image", "path": "seen.png"},
    "alone": PICTURE,
}
UNUSABLE: dict[str, tuple[Any, str]] = {
    "broken": (FILE[:-30], "cannot be read as a picture"),
    "no picture": (b"not a picture", "in no known format"),
    "animated": (ANIMATION, "a GIF of 2 pictures"),
    "missing": ({"type": "image", "path": "missing.png"}, "does not exist"),
    "elsewhere": ({"type": "image", "url": "https://a.b/c.png"}, "from other hosts"),
    "nowhere": ({"type": "image"}, "does not say where"),
    "huge": (Image.new("1", (10_000, 9_000)), "10000 x 9000 pixels"),
    "deep": (Image.new("F", (2, 2)), "32 bits"),
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seen.png").write_bytes(FILE)
    monkeypatch.chdir(tmp_path)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("form", list(FORMS))
def test_every_form_of_picture_arrives_as_file(form: str) -> None:
    part = FORMS[form]
    shown = observation_of(Observation([user({"type": "text", "text": "this"}, part)]), file_of)
    again = step_from({**json.loads(json_of(Step(shown.messages))), "asks": None})
    [[text, picture]] = [message["content"] for message in again.messages]
    assert text == {"type": "text", "text": "this"}
    np.testing.assert_array_equal(np.asarray(decoded(file_in(picture))), PIXELS)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK", "YCbCr"])
def test_object_of_any_mode_is_its_file(mode: str) -> None:
    picture = Image.fromarray(PIXELS.astype(np.uint16)[..., 0] << 8) if mode == "I;16" else PICTURE.convert(mode)
    expected = picture if mode in ("I;16", "LA", "RGBA") else picture.convert("RGB")
    expected = decoded(saved(expected))
    np.testing.assert_array_equal(np.asarray(decoded(file_of(picture))), np.asarray(expected))


def test_object_is_not_turned_by_exif_data() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(io.BytesIO(saved(PICTURE, "png", exif=exif))) as opened:
        assert decoded(file_of(opened)).size == PICTURE.size
    assert decoded(file_of(saved(PICTURE, "png", exif=exif))).size == PICTURE.size[::-1], "but a file is"


@pytest.mark.parametrize("case", list(UNUSABLE))
def test_unusable_picture_breaks_environment(case: str) -> None:
    part, problem = UNUSABLE[case]
    with pytest.raises(BadReturn, match=problem) as broken:
        step_of(Step([user({"type": "text", "text": "this"}, part)]), file_of)
    assert "part 1" in str(broken.value)


@pytest.mark.parametrize("case", list(UNUSABLE))
def test_unusable_picture_of_tool_is_its_error(case: str) -> None:
    part, problem = UNUSABLE[case]

    def look() -> Any:
        """Look."""
        return ["here", part]

    answer = Tools([look]).answer(calls(("look", "{}"))["tool_calls"][0])
    assert answer.failed and answer.message["content"].startswith("Error: the picture ")
    assert problem in answer.message["content"]


def returning(value: Any) -> Callable[[], Any]:
    def look() -> Any:
        """Look."""
        return value

    return look


ANSWERS: dict[str, tuple[Any, list[str]]] = {
    "object": (PICTURE, ["image"]),
    "file": (FILE, ["image"]),
    "part": ({"type": "image", "image": PICTURE}, ["image"]),
    "list": (["a", PICTURE, {"type": "text", "text": "b"}], ["text", "image", "text"]),
}


@pytest.mark.parametrize("case", list(ANSWERS))
def test_tool_answers_with_pictures(case: str) -> None:
    value, kinds = ANSWERS[case]
    step = run(Hosted(None, Tools([returning(value)]), sees=True).step(calls(("look", "{}"))))
    content = step.messages[0]["content"]
    assert [part["type"] for part in content] == kinds and step.metrics == {"tool_errors": 0.0}
    files = [file_in(part) for part in content if part["type"] == "image"]
    np.testing.assert_array_equal(np.asarray(decoded(files[0])), PIXELS)


def test_text_beside_picture_is_cut() -> None:
    step = run(Hosted(None, Tools([returning(["x" * (MOST_CHARACTERS + 5), PICTURE])]), sees=True).step(LOOKS))
    assert step.messages[0]["content"][0]["text"].endswith("5 characters more")


LOOKS = calls(("look", "{}"))


@pytest.mark.parametrize("value", [{"seen": PICTURE}, [[PICTURE]], {"file": FILE}, [PICTURE, 3]])
def test_picture_inside_another_value_is_tools_error(value: Any) -> None:
    answer = Tools([returning(value)]).answer(LOOKS["tool_calls"][0])
    assert answer.failed and "object at" not in answer.message["content"]


def test_blind_policy_gets_no_picture() -> None:
    with pytest.raises(BadReturn, match="shows a picture, .*sees_pictures"):
        step_of(Step([user(PICTURE)]), reader(sees=False))
    with pytest.raises(EnvironmentFailed, match="'look' shows .*sees_pictures"):
        run(Hosted(None, Tools([returning(PICTURE)])).step(LOOKS))


def test_assistants_message_shows_no_picture() -> None:
    with pytest.raises(BadReturn, match="models write only text"):
        step_of(Step([{**user(PICTURE), "role": "assistant"}]), file_of)


def test_reply_of_process_must_have_files() -> None:
    for part in (FORMS["path"], FORMS["url"], {**FORMS["base64"], "path": "seen.png"}, {"type": "image", "base64": 3}):
        with pytest.raises(BadReturn, match="base64"):
            step_from({"messages": [user(part)], "asks": None})
    with pytest.raises(PictureFault, match="is not base64"):
        file_in({"type": "image", "base64": "a"})


def test_too_many_bytes_of_pictures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1500, 2000, 3), dtype=np.uint8)
    shown = [user(Image.fromarray(noise)) for _ in range(2)]
    assert len(json_of(step_of(Step(shown), file_of))) > 4 << 20, "pictures have a limit of their own"
    monkeypatch.setattr("roll.agents.environments.checked.MOST_SHOWN", 1 << 20)
    with pytest.raises(BadReturn, match="pictures of the Step"):
        json_of(step_of(Step(shown), file_of))
    assert MOST_SHOWN < 64 << 20


WORLDS = """
from PIL import Image

from roll.agents.environments.base import Observation, Step


class Shows:
    shows_pictures = True

    def reset(self, row, seed):
        return Observation([{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (9, 9))}]}])

    def step(self, message):
        return Step()

    def close(self):
        pass


class Undeclared(Shows):
    shows_pictures = False
"""


@pytest.mark.parametrize("sees", [True, False])
def test_process_shows_pictures_to_seeing_policy(sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shows.py").write_text(WORLDS)
    monkeypatch.syspath_prepend(tmp_path)

    async def opened(name: str) -> Observation:
        process = EnvironmentProcess("act", section(environment=f"shows:{name}"), limits.START, sees)
        try:
            await process.start()
            return await process.open(0, {}, 0)
        finally:
            await process.close()

    if sees:
        [part] = run(opened("Shows")).messages[0]["content"]
        assert decoded(file_in(part)).size == (9, 9)
        return
    with pytest.raises(ConfigError) as refused:
        run(opened("Shows"))
    assert_fault(refused.value.faults, "environments.act.environment", "unfit", "shows a picture", "sees_pictures")
    with pytest.raises(EnvironmentFailed, match="sees_pictures"):
        run(opened("Undeclared"))


def test_task_of_row_keeps_its_pictures() -> None:
    row = {"messages": [user(FORMS["base64"], {"type": "text", "text": "this"})]}
    assert task_of(row) == row["messages"]
    longer = with_more(task_of(row), "more")  # type: ignore[arg-type]
    assert longer[0]["content"][-1] == {"type": "text", "text": "\n\nmore"} and len(longer[0]["content"]) == 3


class Server:
    """A connection to an MCP server whose tool answers with a text and a picture."""

    def __init__(self, data: str) -> None:
        self._data = data

    async def call_tool(self, name: str, given: Any) -> CallToolResult:
        picture = ImageContent(type="image", data=self._data, mime_type="image/png")
        return CallToolResult(content=[TextContent(type="text", text="here"), picture])


@pytest.mark.parametrize(("sees", "data"), [(True, ENCODED), (True, "AAAA"), (False, ENCODED)])
def test_servers_picture_is_shown_or_noted(sees: bool, data: str) -> None:
    tools, connection = McpTools((), sees), cast(Client, Server(data))
    tools._clients["look"] = (McpServer((), "url", limits.CALL), connection)  # pyright: ignore[reportPrivateUsage]
    answer = run(tools.answer(LOOKS["tool_calls"][0]))
    content = answer.message["content"]
    if not sees:
        assert content.endswith("type image is left out]")
    elif data != ENCODED:
        assert answer.failed and content.startswith("Error: the picture")
    else:
        assert content[0]["text"] == "here" and file_in(content[1]) == FILE
