"""Triton asks for a compiler, and never calls it."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class NoCompiler(BaseBackend):
    """Compiles nothing."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError

    def add_stages(self, stages: dict[str, Any], options: object, language: object = None) -> None:
        raise NotImplementedError

    def load_dialects(self, context: object) -> None:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, Any]:
        return {}
