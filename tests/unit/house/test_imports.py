"""The import direction: which package may import which. Imports are read from the source, so lazy imports count as
well.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from roll.config.schema import backend

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "roll").rglob("*.py"))
LINES = [
    {"types", "errors", "registry", "system"},
    {"stores"},
    {"algorithms", "hosted", "cluster"},
    {"config"},
    {"data", "rollout", "weight_sync"},
    {"backend"},
    {"models"},
    {"backend_settings"},
    {"ray"},
    {"engines", "training"},
    {"rewards", "doctor"},
    {"agents", "tracking"},
    {"runs", "compare"},
    {"convert", "export", "pipeline"},
    {"evaluation", "given"},
    {"api", "evaluate"},
]
HEIGHT = {name: height for height, line in enumerate(LINES) for name in line}
ROOMS = ["shipped", "schema", "derived", "roll_v2", "load", "checks", "plan", "docs", "json_schema"]
"""Packages of `roll/config/`. Each may import those before it. The first and the last two are files."""
KEPT_TO = {
    "ray": ["roll/ray/*"],
    "deepspeed": ["roll/training/deepspeed/*"],
    "vllm": ["roll/engines/vllm/*", "roll/weight_sync/vllm_plugin.py"],
    "renderers": ["roll/data/renderers/families.py"],
    "fsspec": ["roll/stores/store.py"],
    "filelock": ["roll/system/own_folder.py"],
    "aiohttp": ["roll/agents/gateway/server.py", "roll/agents/environments/server_session.py"],
}
BACKENDS = [name.removesuffix(".settings") for name in backend.BACKENDS]
HEAVY = {"torch", "ray", "transformers", "deepspeed", "vllm", "peft", "numpy"}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and full name of every import, at any depth. `from a import b` is reported as `a.b`, because b may
    be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Return the imports of a file."""
    return list(imports(ast.parse(path.read_text())))


def package(path: Path) -> str:
    """Return the package of a file: `models` for roll/models/load.py, `types` for roll/types.py."""
    return path.relative_to(ROOT / "roll").parts[0].removesuffix(".py")


def house_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and package of every import from `roll`."""
    for line, name in imports_of(path):
        if name.startswith("roll."):
            yield line, name.split(".")[1]


def test_every_package_has_its_place() -> None:
    assert {package(path) for path in SOURCES} - {"__init__"} == set(HEIGHT)


def test_packages_import_only_from_layers_below() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports roll.{target}"
        for path in SOURCES
        if package(path) != "__init__"  # it exports the names of roll/api.py
        for line, target in house_imports(path)
        if HEIGHT[target] > HEIGHT[package(path)]
    ]
    assert not wrong, "\n".join(wrong)


def in_circles(knows: Mapping[str, set[str]]) -> list[str]:
    """Return the names that import themselves through others."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = knows.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    return [name for name in sorted(knows) if name in reachable(name)]


def test_packages_have_no_circular_imports() -> None:
    knows: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        knows[package(path)] |= {target for _, target in house_imports(path)} - {package(path)}
    assert not in_circles(knows)


def room(path: Path) -> str:
    """Return the package below roll/config: `checks` for roll/config/checks/algorithm.py, `docs` for
    roll/config/docs.py.
    """
    return path.relative_to(ROOT / "roll" / "config").parts[0].removesuffix(".py")


def config_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and full name of every import of roll/config."""
    for line, name in imports_of(path):
        if name.startswith("roll.config."):
            yield line, name


CONFIG = [path for path in SOURCES if package(path) == "config" and path.name != "__init__.py"]


def test_every_room_of_the_configuration_has_its_place() -> None:
    assert {room(path) for path in CONFIG} == set(ROOMS)


def test_config_modules_import_only_from_layers_below() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in CONFIG
        for line, name in config_imports(path)
        if ROOMS.index(name.split(".")[2]) > ROOMS.index(room(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_config_modules_have_no_circular_imports() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in CONFIG}
    knows = {
        name: {module for _, found in config_imports(path) for module in modules if belongs(found, module)}
        for name, path in modules.items()
    }
    assert sum(map(len, knows.values())) > len(CONFIG), "the test sees too few imports"
    assert not in_circles(knows)


def belongs(name: str, module: str) -> bool:
    """Return whether an import's full name is the module or a name in it."""
    return name == module or name.rpartition(".")[0] == module


def users_of(module: str, folder: str) -> list[str]:
    """Return the imports of a module, or of what it contains, outside a folder of roll."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in SOURCES
        if not path.is_relative_to(ROOT / folder)
        for line, name in imports(ast.parse(path.read_text()))
        if f"{name}.".startswith(f"{module}.")
    ]


def test_only_the_configuration_imports_its_checks() -> None:
    assert not users_of("roll.config.checks", "roll/config")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_has_its_settings_to_itself(backend: str) -> None:
    assert not users_of(f"{backend}.settings", backend.replace(".", "/"))


@pytest.mark.parametrize("library", sorted(KEPT_TO))
def test_engine_libraries_are_imported_only_by_their_backend(library: str) -> None:
    def uses(path: Path) -> bool:
        return any(name.split(".")[0] == library for _, name in imports_of(path))

    users = [path.relative_to(ROOT) for path in SOURCES if uses(path)]
    assert users, f"nothing imports {library}: this test looks in the wrong place"
    assert not [str(path) for path in users if not any(path.match(pattern) for pattern in KEPT_TO[library])]


def test_config_imports_only_declarations_of_algorithms() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in CONFIG
        for line, name in imports_of(path)
        if name.startswith("roll.algorithms.") and not name.startswith("roll.algorithms.methods.")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_configuration_imports_nothing_heavy() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in SOURCES
        if package(path) in ("config", "errors", "registry")
        or path.is_relative_to(ROOT / "roll" / "algorithms" / "methods")
        for line, name in imports_of(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_the_tests_see_an_import_that_is_wrong() -> None:
    source = "def late():\n    from roll.runs import rlvr\n    import ray.util\n"
    assert list(imports(ast.parse(source))) == [(2, "roll.runs.rlvr"), (3, "ray.util")]
