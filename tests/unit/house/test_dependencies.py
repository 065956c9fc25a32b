"""pyproject.toml requires all packages that the code imports, and the locks satisfy its requirements."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.unit.house.pins import locked, requirements

ROOT = Path(__file__).resolve().parents[3]
PART_OF_ANOTHER = {"pydantic-core"}
"""Packages that need no requirement: pydantic requires pydantic-core in exactly one version."""
NOT_EVERYWHERE = {"pynvml": ["nvidia-ml-py"]}
"""Modules that only the GPU environment has, and the distributions that provide them."""


def imported() -> set[str]:
    """Return the top-level names of third-party packages that roll and its examples import."""
    found = set()
    for file in [*(ROOT / "roll").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - {"roll"} - set(sys.stdlib_module_names)


def test_every_import_is_asked_for() -> None:
    asked = {
        canonicalize_name(requirement.name) for requirement in requirements("gpu", "cpu", "trackers", "bitsandbytes")
    } | PART_OF_ANOTHER
    distributions = NOT_EVERYWHERE | dict(packages_distributions())
    missing = {
        name for name in imported() if not asked & {canonicalize_name(one) for one in distributions.get(name, [name])}
    }
    assert missing == set()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_lock_has_what_is_asked_for(kind: str) -> None:
    versions = locked(kind)
    for requirement in requirements(kind, "bitsandbytes", *(["liger"] if kind == "gpu" else [])):
        name = canonicalize_name(requirement.name)
        assert name in versions, requirement
        assert requirement.specifier.contains(versions[name], prereleases=True), f"{requirement}: {versions[name]}"


def test_locks_agree_on_versions_of_common_packages() -> None:
    cpu, gpu = locked("cpu"), locked("gpu")
    both = cpu.keys() & gpu.keys()
    assert {"torch", "transformers", "deepspeed", "ray", "triton"} < both
    assert {
        name: (cpu[name], gpu[name]) for name in both if Version(cpu[name]).public != Version(gpu[name]).public
    } == {}
