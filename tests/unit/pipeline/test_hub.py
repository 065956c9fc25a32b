"""The upload of an export, against a server on this machine that answers as the Hub does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from roll.config.load.compose import compose
from roll.config.load.loader import checked_config
from roll.config.plan.plan import make_plan
from roll.errors import ConfigError, FaultCode, RollError
from roll.runs.checkpointer import EXPORT_MARK
from roll.runs.hub import check_upload, upload
from tests.faults import coded

OWN = {"name": "ada", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}}
FILES = {"config.json": '{"model_type": "qwen2"}', "deep/tokens.txt": "a b c"}


@dataclass
class Hub:
    """What the server answers, and what it received."""

    user: dict[str, Any] = field(default_factory=lambda: dict(OWN))
    refused: str = ""
    """Part of the paths that are answered with status 403."""
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer hf_right" and "whoami" in self.path
            self._say(200 if known else 401, served.user if known else {"error": "Invalid token"})

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
            if served.refused and served.refused in self.path:
                return self._say(403, {"error": "no quota left"})
            if self.path == "/api/repos/create":
                served.created.append(json.loads(sent))
                return self._say(200, {"url": f"{address}/ada/model"})
            if "/preupload/" in self.path:
                told = {"uploadMode": "regular", "shouldIgnore": False}
                files = [{"path": one["path"], **told} for one in json.loads(sent)["files"]]
                return self._say(200, {"files": files})
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "file":
                    served.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"]).decode()
            return self._say(
                200, {"commitOid": "0" * 40, "commitUrl": f"{address}/ada/model/commit/0", "success": True}
            )

        def _say(self, status: int, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "my-run" / "export"
    for name, text in {**FILES, EXPORT_MARK: ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("private", [True, False])
def test_export_is_uploaded_without_its_mark(private: bool, hub: Hub, export: Path) -> None:
    check_upload("ada/model")
    assert upload(export, "ada/model", private, EXPORT_MARK).endswith("/ada/model")
    assert hub.files == FILES
    (made,) = hub.created
    assert (made["organization"], made["name"]) == ("ada", "model")
    assert made["visibility"] == ("private" if private else "public")


@pytest.mark.parametrize("refused", ["create", "preupload", "commit"])
def test_failed_upload_says_how_to_repeat_it(refused: str, hub: Hub, export: Path) -> None:
    hub.refused = refused
    with pytest.raises(RollError) as caught:
        upload(export, "ada/model", True, EXPORT_MARK)
    assert "no quota left" in str(caught.value)
    assert f"hf upload ada/model {export}" in str(caught.value)
    assert (export / "config.json").is_file()


def refusal(repository: str) -> list[tuple[FaultCode, str]]:
    with pytest.raises(ConfigError) as caught:
        check_upload(repository)
    assert "hf_" not in str(caught.value)
    return coded(caught.value.faults)


def test_unusable_tokens_are_faults_before_the_run(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_upload("lab/model")
    check_upload(None)
    assert refusal("somebody/model") == [("not_allowed", "push_to_hub")]
    hub.user["auth"] = {"accessToken": {"role": "read"}}
    assert refusal("ada/model") == [("not_allowed", "push_to_hub")]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refusal("ada/model") == [("failed", "push_to_hub")]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert refusal("ada/model") == [("failed", "push_to_hub")]
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert refusal("ada/model") == [("missing", "push_to_hub")]


@pytest.mark.parametrize(
    ("words", "code", "place"),
    [
        (("+push_to_hub=model",), "malformed", "push_to_hub"),
        (("+push_to_hub=true",), "wrong_type", "push_to_hub"),
        (("+push_to_hub=ada/model", "save_at_end=false"), "contradiction", "push_to_hub"),
        (("+push_to_hub_private=false",), "owner_missing", "push_to_hub_private"),
    ],
)
def test_contradicting_keys_of_an_upload_are_faults(words: tuple[str, ...], code: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(
            ["--config-name", "tiny/tiny_warm_up", "dry_run=true", *words],
            lambda composed, presets: make_plan(checked_config(composed, presets)) and None,
        )
    assert (code, place) in coded(caught.value.faults)
