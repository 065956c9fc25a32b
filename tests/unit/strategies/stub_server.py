"""A server with the paths of vLLM's that `VllmServer` uses, and no engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOG_PROBS = (-0.5, -1.25, -2.0)


def info_of(model: str) -> dict[str, Any]:
    """Return a `/server_info` of a server that fits, with the keys that roll reads."""
    of_model = {
        "seed": 0,
        "model": model,
        "tokenizer": model,
        "dtype": "torch.float32",
        "max_model_len": 64,
        "quantization": None,
    }
    config = {
        "model_config": of_model | {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"},
        "scheduler_config": {"max_num_seqs": 8, "enable_chunked_prefill": False},
        "weight_transfer_config": {"backend": "roll"},
        "speculative_config": None,
        "parallel_config": {"data_parallel_size": 1},
        "device_config": {"device": "cpu"},
    }
    return {"vllm_config": config}


class StubServer:
    """State of the server. Each sample has the tokens 65, 66 and 67, of the version that the server has."""

    def __init__(self, model: str) -> None:
        self.info = info_of(model)
        self.version, self.is_paused, self.is_healthy = "default", False, True
        self.takes_tokens = True
        self.asked: list[tuple[str, Any]] = []
        """Path and body of each POST, in order."""
        self.answers: dict[str, tuple[int, Any]] = {}
        """Status and body of the answer to a path, instead of the usual one."""
        self.url = ""

    def get(self, path: str) -> tuple[int, Any]:
        known = {
            "/health": (200 if self.is_healthy else 503, {}),
            "/server_info": (200, self.info),
            "/weight_info": (200, {"weight_version": self.version}),
            "/is_paused": (200, {"is_paused": self.is_paused}),
        }
        return self.answers.get(path) or known[path]

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        if (path, body) == ("/inference/v1/generate", {}):
            return (422 if self.takes_tokens else 403), {}
        self.asked.append((path, body))
        route = path.partition("?")[0]
        if route == "/update_weight_version":
            self.version = body["new_version"]
        if route in ("/pause", "/resume"):
            self.is_paused = route == "/pause"
        return self.answers.get(route) or (200, {"choices": [self.sample()]})

    def sample(self) -> dict[str, Any]:
        content = [{"token_id": 65 + place, "logprob": value} for place, value in enumerate(LOG_PROBS)]
        spans = [{"version": self.version, "start": 0, "end": 3}]
        sample = {"token_ids": [65, 66, 67], "finish_reason": "length", "weight_versions": spans}
        return sample | {"logprobs": {"content": content}}

    @property
    def paths(self) -> list[str]:
        """The paths of all POSTs, in order."""
        return [path for path, _ in self.asked]


@contextmanager
def stub_server(model: str) -> Iterator[StubServer]:
    """Serve a stub on this host."""
    stub = StubServer(model)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self._answer(*stub.get(self.path.partition("?")[0]))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(*stub.post(self.path, json.loads(content) if content else None))

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()
