"""Names of the standard library that programs may use without an import, as on programming contest sites."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
import types
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

MODULES = (
    *(
        "bisect",
        "collections",
        "copy",
        "datetime",
        "functools",
        "heapq",
        "io",
        "itertools",
        "json",
        "math",
        "operator",
        "random",
        "re",
    ),
    *("statistics", "string", "sys", "typing"),
)
OF_MODULES = {
    "typing": "Any Callable Deque Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping NamedTuple "
    "Optional Sequence Set Tuple Type TypeVar Union",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice pairwise "
    "permutations product takewhile zip_longest",
    "math": "atan2 ceil comb cos exp factorial floor gcd hypot inf fabs isclose isqrt lcm log log10 log2 pi prod "
    "radians sin sqrt tan",
    "copy": "deepcopy",
    "operator": "itemgetter",
    "string": "ascii_lowercase ascii_letters ascii_uppercase digits punctuation",
    "statistics": "mean median",
    "datetime": "timedelta",
}
PACKAGES = {
    "np": "numpy",
    "numpy": "numpy",
    "pd": "pandas",
    "pandas": "pandas",
    "torch": "torch",
    "scipy": "scipy",
    "sympy": "sympy",
    "cmath": "cmath",
}
"""Packages that a test may use without an import, by name."""
OF_TESTS = (
    *(*MODULES, *PACKAGES, "isclose", "fabs", "pytest", "unittest", "TestCase", "approx", "allclose", "array_equal"),
    *("assert_allclose", "assert_almost_equal", "assert_array_equal", "assert_array_almost_equal", "assert_equal"),
)
"""Names with which a test judges. It never takes them from the candidate."""
OF_CHECKS = (*OF_TESTS, *(name for names in OF_MODULES.values() for name in names.split()))
"""Names that a function `check` never takes from the candidate. It receives the function under test as an argument."""
NOT_FOR_PROGRAMS = ("unittest", "doctest", "test", "ctypes")
"""Modules whose objects are never provided to a test, even if the candidate imports them."""
MODULE_OF = {name: module for module, names in OF_MODULES.items() for name in names.split()}


def provide(tree: ast.AST, namespace: dict[str, Any], here: Iterable[str] = ()) -> None:
    """Add to a namespace names of MODULES and OF_MODULES that a program uses, unless in it or in `here`."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - namespace.keys() - set(here)
    for name in read:
        if name in MODULE_OF:
            namespace[name] = getattr(importlib.import_module(MODULE_OF[name]), name)
        elif name in MODULES:
            namespace[name] = importlib.import_module(name)


def provide_packages(tree: ast.AST, namespace: dict[str, Any]) -> None:
    """Add to a namespace the packages of PACKAGES that a test uses, if they are installed."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - namespace.keys()
    for name in read & PACKAGES.keys():
        if find_spec(PACKAGES[name]) is not None:
            namespace[name] = importlib.import_module(PACKAGES[name])


def imported_by(tree: ast.Module) -> dict[str, Any]:
    """Repeat a program's top-level imports of the standard library in this process. Return the names that they bind."""
    bound: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                if top in sys.stdlib_module_names:
                    module = importlib.import_module(alias.name)
                    bound[alias.asname or top] = module if alias.asname else sys.modules[top]
        elif (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").partition(".")[0] in sys.stdlib_module_names
        ):
            bound |= _names_of(importlib.import_module(str(node.module)), node.names)
    return {name: value for name, value in bound.items() if not hasattr(builtins, name) and _is_harmless(value)}


def _is_harmless(value: Any) -> bool:
    """Return whether an object cannot pass a test by its nature, as `unittest.mock.ANY`, equal to all, can."""
    if (getattr(value, "__module__", "") or getattr(value, "__name__", "")).partition(".")[0] in NOT_FOR_PROGRAMS:
        return False
    return (
        callable(value) or isinstance(value, types.ModuleType | int | float | str) or type(value).__module__ == "typing"
    )


def _names_of(module: Any, names: list[ast.alias]) -> dict[str, Any]:
    if names[0].name == "*":
        public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        return {name: getattr(module, name) for name in public}
    return {alias.asname or alias.name: getattr(module, alias.name) for alias in names if hasattr(module, alias.name)}
