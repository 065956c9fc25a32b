"""The child process of user_code.py, which imports the user's code: `python -m roll.config.load.user_code_child
PARENT`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import pickle
import sys
import traceback
import typing
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from roll.algorithms.methods.base import declared
from roll.algorithms.methods.kinds import KINDS, MethodKey
from roll.config.derived.rewards import is_async, only_side_by_side
from roll.config.load.user_code import UserPart
from roll.config.schema.base import StrictConfig
from roll.config.schema.faults import printable, schema_faults
from roll.errors import Fault
from roll.registry import imported, nearest
from roll.system.orphans import die_with

REWARD = {False: ("prompt", "response", "row"), True: ("prompt", "responses", "row")}
"""Positional arguments of a reward, by whether it receives a group of responses."""


class LenientConfig(StrictConfig):
    """Base for the arguments of a function with `**kwargs`, which accepts any key."""

    model_config = {"extra": "allow"}


class PartRefused(Exception):
    """A part cannot be used. Carries the fault."""

    def __init__(self, place: tuple[str, ...], problem: str, remedy: str) -> None:
        self.fault = Fault(".".join(place), problem, remedy)


def main(parent: int) -> None:
    """Read the parts from stdin, and write one line of JSON for each to stdout. Output of imported modules goes to
    stderr.
    """
    die_with(parent)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for part in json.load(sys.stdin):
            print(json.dumps(inspect_part(UserPart(**part))), file=answers, flush=True)


def inspect_part(part: UserPart) -> dict[str, Any]:
    """Return the traits that a part declares, and the faults of the part and of its arguments, as plain JSON values."""
    try:
        faults, traits = _inspect(part, KINDS[part.kind] if part.kind else None)
    except PartRefused as refused:
        faults, traits = [refused.fault], {}
    return {"faults": [dataclasses.asdict(fault) for fault in faults], "traits": traits}


def _inspect(part: UserPart, kind: MethodKey | None) -> tuple[list[Fault], dict[str, Any]]:
    os.environ.update(part.environment)
    entry = _imported(part)
    keys = _keys_of_class(part, kind, entry) if kind and kind.base else _keys_of_function(part, kind, entry)
    traits = _traits(part, kind, entry) if kind else {}
    if kind is None and part.concurrency > 1 and not is_async(entry):
        return [*_wrong_values(part, keys), only_side_by_side(part.place[1], part.concurrency, [part.name])], traits
    return list(_wrong_values(part, keys)) or list(_unmade(part, kind, entry)), traits


def _imported(part: UserPart) -> Any:
    name, _, attribute = part.name.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            here = sorted(file.removesuffix(".py") for file in os.listdir() if file.endswith(".py"))
            problem = f"'{part.name}', but there is no module '{error.name}'{nearest(error.name, here)}"
            remedy = "use package.module:Name of an installed package, or of a file in the working directory"
            raise PartRefused(part.place, problem, remedy) from error
        raise PartRefused(
            part.place, f"'{part.name}' cannot be imported: {error}", "install the package that the module imports"
        ) from error
    except BaseException as error:  # A module that calls sys.exit() must be a fault, too.
        raise PartRefused(
            part.place, f"'{part.name}' cannot be imported: {_error_line(error, name)}", "fix the module"
        ) from error
    if not hasattr(module, attribute):
        known = _own_names(module)
        remedy = (
            f"use one of the names that it defines: {', '.join(known)}"
            if known
            else "define it there; the module defines no name yet"
        )
        raise PartRefused(
            part.place, f"'{part.name}', but the module has no '{attribute}'{nearest(attribute, known)}", remedy
        )
    return getattr(module, attribute)


def _error_line(error: BaseException, module: str) -> str:
    """Return the error as one line, with its place in the user's file, if it has one."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next(
        (frame for frame in reversed(frames) if "importlib" not in frame.filename and frame.filename != __file__), None
    )
    where = f" ({os.path.basename(last.filename)}, line {last.lineno})" if last else ""
    return f"{type(error).__name__}: {error}{where}"


def _own_names(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    )


def _keys_of_function(part: UserPart, kind: MethodKey | None, entry: Any) -> type[BaseModel]:
    noun, call = (kind.noun, kind.call) if kind else ("a reward", REWARD[part.group])
    form = f"def {part.name.partition(':')[2]}({', '.join(call)}, *, a_key: float = 1.0)"
    if not callable(entry) or (kind and inspect.isclass(entry)):
        raise PartRefused(
            part.place, f"'{part.name}' is a {_type_of(entry)}, but {noun} is a function", f"write it as {form}"
        )
    if kind and is_async(entry):
        raise PartRefused(part.place, f"'{part.name}' is asynchronous", "make it a plain function, without async")
    signature = inspect.signature(entry)
    _check_call(part, signature, call, f"write it as {form}")
    positional = [
        name
        for name, one in signature.parameters.items()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    own = [one for name, one in signature.parameters.items() if name not in positional[: len(call)]]
    return _keys(entry, own)


def _keys_of_class(part: UserPart, kind: MethodKey, entry: Any) -> type[BaseModel]:
    assert kind.base is not None, "a kind of functions"
    base, form = imported(kind.base), f"a frozen dataclass that derives from {kind.base.replace(':', '.')}"
    remedy = f"write it as {form}, with def __call__(self, {', '.join(kind.call)})"
    if not inspect.isclass(entry) or base not in entry.__mro__:
        raise PartRefused(part.place, f"'{part.name}' is a {_type_of(entry)}, but {kind.noun} is {form}", remedy)
    if not dataclasses.is_dataclass(entry) or not entry.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise PartRefused(
            part.place,
            f"'{part.name}' is not a frozen dataclass, but only frozen dataclasses can be sent to workers",
            "put @dataclass(frozen=True) above it",
        )
    if entry.__call__ is base.__call__:
        raise PartRefused(part.place, f"'{part.name}' has no __call__ of its own", remedy)
    _check_call(part, inspect.signature(entry.__call__), ("self", *kind.call), remedy)
    return _keys(entry, list(inspect.signature(entry).parameters.values()))


def _check_call(part: UserPart, signature: inspect.Signature, call: tuple[str, ...], remedy: str) -> None:
    try:
        bound = signature.bind_partial(*call)
    except TypeError as error:
        problem = f"'{part.name}' has the signature {signature}, but is called with {', '.join(call)}: {error}"
        raise PartRefused(part.place, problem, remedy) from error
    if call[0] == "self":  # configured arguments set the fields of a class, so its `__call__` must not require any
        missing = [
            name
            for name, one in signature.parameters.items()
            if name not in bound.arguments
            and one.default is one.empty
            and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        if missing:
            problem = (
                f"'{part.name}' has the signature {signature}, but is called with {', '.join(call)}, without "
                f"{', '.join(missing)}"
            )
            raise PartRefused(part.place, problem, remedy)


def _type_of(entry: Any) -> str:
    return "class" if inspect.isclass(entry) else type(entry).__name__


def _keys(entry: Callable[..., Any], parameters: list[inspect.Parameter]) -> type[BaseModel]:
    """Return a schema with the parameters as keys. A parameter whose type pydantic cannot check accepts any value."""
    fields: dict[str, Any] = {}
    for one in parameters:
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            default = ... if one.default is one.empty else dataclasses.MISSING if one.default is None else one.default
            fields[one.name] = (_annotation(entry, one), None if default is dataclasses.MISSING else default)
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return create_model("Keys", __base__=LenientConfig if open_ended else StrictConfig, **fields)


def _annotation(entry: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty:
        return Any
    names = vars(sys.modules[entry.__module__])
    try:
        holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
        found = typing.get_type_hints(holder, globalns=names, include_extras=True)[parameter.name]
        TypeAdapter(found, config={"strict": True})
    except (NameError, TypeError, AttributeError, PydanticUserError):
        return Any
    return found


def _traits(part: UserPart, kind: MethodKey, entry: Any) -> dict[str, Any]:
    traits: Any = declared(entry) or kind.traits
    wanted = type(kind.traits)
    if type(traits) is not wanted:
        problem = f"'{part.name}' declares {type(traits).__name__}, but is used as {kind.noun}"
        raise PartRefused(part.place, problem, f"declare {wanted.__name__}")
    values = dataclasses.asdict(traits)
    try:
        TypeAdapter(wanted).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = (
            f"'{part.name}' declares {'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg'].lower()}"
        )
        raise PartRefused(part.place, problem, f"fix the values that it declares in {wanted.__name__}") from error
    return values


def _wrong_values(part: UserPart, keys: type[BaseModel]) -> Iterator[Fault]:
    """Yield the faults of the part's arguments. They are checked within the blocks around them, so that the faults have
    full key paths.
    """
    block, *above = reversed(part.arguments_place)
    root, values = create_model("Block", **{block: (keys, ...)}), {block: part.arguments}  # type: ignore[call-overload]
    for name, blocks in zip(above[::2], above[1::2], strict=True):
        root = create_model("Root", **{blocks: (dict[str, root], ...)})  # type: ignore[call-overload,valid-type]
        values = {blocks: {name: values}}
    try:
        root.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        yield from schema_faults(error, root, values)


def _unmade(part: UserPart, kind: MethodKey | None, entry: Any) -> Iterator[Fault]:
    """Yield a fault if the class does not accept the arguments, or if its object cannot be sent to workers."""
    if kind is None or kind.base is None:
        return
    try:
        pickle.loads(pickle.dumps(entry(**part.arguments)))
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        problem = f"{printable(part.arguments)}: '{part.name}' cannot be created with them and sent to workers: {cause}"
        yield Fault(".".join(part.arguments_place), problem, "use values that it accepts")


if __name__ == "__main__":
    main(int(sys.argv[1]))
