"""The process that runs a test and alone decides. It has the test's code, and proxies of the candidate's objects."""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from roll.rewards.sandbox.inside import pytest_like
from roll.rewards.sandbox.inside.link import Link
from roll.rewards.sandbox.inside.usual import OF_CHECKS, OF_TESTS, imported_by, provide, provide_packages
from roll.rewards.sandbox.inside.wire import Broken, Channel

PASSED, FAILED = b"passed", b"failed"
SOLUTION = "solution"
RESPONSE = "response"


def run_test(test: Mapping[str, Any], channel: Channel) -> tuple[bytes, str]:
    """Return (PASSED or FAILED, the reason of a failure).

    Args:
        test: `kind` (`assert`, `check` or `text`), `code` of the test, `source` of the candidate, `entry` (name of the
            function to pass to `check`), and `response` (the text of the response).
    """
    try:
        _run(test, channel)
    except Broken as broken:
        return FAILED, str(broken)
    except BaseException as error:  # a test that calls sys.exit() does not pass
        return FAILED, f"{type(error).__name__}: {error}"
    return (FAILED, "the candidate's process ended during the test") if channel.broken else (PASSED, "")


def _run(test: Mapping[str, Any], channel: Channel) -> None:
    module = types.ModuleType("__main__")
    namespace = vars(module)
    sys.modules["__main__"] = module
    sys.modules["pytest"] = pytest_like
    tree = ast.parse(test["code"], "test.py")
    if test["kind"] == "text":
        namespace[RESPONSE] = test[RESPONSE]
        tree = ast.fix_missing_locations(_Response(test[RESPONSE]).visit(tree))
    else:
        names = Link(channel, guarded=True).request("names")
        of_python = OF_CHECKS if test["kind"] == "check" else OF_TESTS
        namespace |= {
            name: value for name, value in names.items() if not hasattr(builtins, name) and name not in of_python
        }
        namespace |= imported_by(ast.parse(test["source"]))
        solution = types.ModuleType(SOLUTION)
        vars(solution).update(names)
        sys.modules[SOLUTION] = solution
        provide_packages(tree, namespace)
    provide(tree, namespace)
    exec(compile(tree, "test.py", "exec", dont_inherit=True), namespace)
    if test["kind"] == "check":
        namespace["check"](names[test["entry"]] if test["entry"] in names else namespace[test["entry"]])
    else:
        _run_tests(namespace)


def _run_tests(namespace: dict[str, Any]) -> None:
    """Run the test functions, methods of test classes and unittest cases of a namespace. Raise at the first failure."""
    unittest = sys.modules.get("unittest")  # has been imported if there are such cases; importing it takes long
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", None) == "__main__"}
    fixtures = {name: value for name, value in own.items() if isinstance(value, pytest_like.Fixture)}
    for name, value in own.items():
        if unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            for _, message in (*result.failures, *result.errors):
                raise AssertionError(message.strip().rpartition("\n")[2])
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [method for method in vars(value) if method.startswith("test")]:
                holder = value()
                getattr(holder, "setup_method", lambda *_: None)(*[None][: _parameters(holder, "setup_method")])
                _run_test(getattr(holder, method), fixtures)
        elif inspect.isfunction(value) and name.startswith("test"):
            _run_test(value, fixtures)


def _parameters(holder: Any, name: str) -> int:
    return len(inspect.signature(getattr(holder, name)).parameters) if hasattr(holder, name) else 0


def _run_test(function: Callable[..., Any], fixtures: Mapping[str, Any]) -> None:
    for arguments in pytest_like.parametrised(function):
        with pytest_like.fixtures_for(function, arguments, fixtures) as given:
            try:
                result = function(**arguments, **given)
                if inspect.iscoroutine(result):
                    import asyncio  # here, because it takes a fifth of the time of a short program

                    asyncio.run(result)
            except pytest_like.Skipped:
                pass


class _Response(ast.NodeTransformer):
    """Replaces `{response}` in a test by the response, always as data: within a string, or as a string."""

    def __init__(self, text: str) -> None:
        self._text = text

    def visit_Set(self, node: ast.Set) -> ast.AST:
        match node.elts:
            case [ast.Name(id="response")]:
                return ast.Constant(self._text)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(node.value.replace("{response}", self._text)) if isinstance(node.value, str) else node


def write_verdict(descriptor: int, verdict: bytes, note: str) -> None:
    """Write the verdict and its reason to the supervisor's pipe."""
    os.write(descriptor, verdict + b"\n" + note.encode("utf-8", "replace")[:2000])
