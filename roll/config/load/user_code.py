"""Checks the user's code that a configuration names, in a separate process, so that a dry run does not import it here.

ask, in this process                        main, in the child
  ── parts: names, and values of their keys ─▶  imports each
  ◀── traits and faults of each part ─────────  one line of JSON for each part, written as soon as it is checked
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from roll.algorithms.methods import KINDS, Method, MethodKey, declared, is_path
from roll.config.derived.domains import is_async, only_side_by_side
from roll.config.schema.base import StrictConfig, variable_text
from roll.config.schema.faults import printable, schema_faults
from roll.config.shipped import known_rewards
from roll.errors import Fault, FaultCode
from roll.hosted.raised import is_of_compilation
from roll.registry import imported, imported_module, nearest, split_path
from roll.system.orphans import die_with

IMPORT_SECONDS = 120.0
"""Deadline for importing all modules, in seconds. torch alone takes several seconds."""
IMPORTERS = (__file__, imported_module.__code__.co_filename)
"""Files of roll that are in the traceback of every error of a module that is imported."""


@dataclass(frozen=True)
class UserPart:
    """A class or function of the user, or a built-in reward with arguments, as a configuration names it."""

    name: str
    """`package.module:Name`"""
    place: tuple[str, ...]
    """Path of the key that names it."""
    arguments_place: tuple[str, ...]
    """Path of the block with its arguments."""
    arguments: dict[str, Any]
    kind: str | None = None
    """Key in `KINDS`, None for a reward."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables to set before its module is imported."""
    group: bool = False
    """Whether it is a reward that receives all responses to a prompt in one call."""
    concurrency: int = 1
    """Number of concurrent calls of a reward. 1 if it shares its process with other rewards."""


@dataclass(frozen=True)
class InspectedPart:
    """The result of checking a part."""

    faults: tuple[Fault, ...]
    traits: Mapping[str, Any]


def inspect_user_code(values: Mapping[str, Any]) -> tuple[dict[str, Method[Any]], list[Fault]]:
    """Import the user's code that the plain values name, and check its arguments.

    Returns:
        The user's methods that have no faults, by key, with the traits that they declare; and the faults of all parts.
    """
    parts = list(user_parts(values))
    looked = ask(parts, _texts(values.get("system_envs"))) if parts else []
    methods = {
        part.kind: Method(part.name, type(KINDS[part.kind].traits)(**said.traits))
        for part, said in zip(parts, looked, strict=True)
        if part.kind is not None and not said.faults
    }
    return methods, [fault for said in looked for fault in said.faults]


def user_parts(values: Mapping[str, Any]) -> Iterator[UserPart]:
    """Yield every `package.module:Name` in the unchecked plain values, and every built-in reward that has arguments."""
    for kind in KINDS.values():
        if is_path(name := values.get(kind.key)):
            yield UserPart(name, (kind.key,), (kind.arguments,), _block(values.get(kind.arguments)), kind.key)
    for domain, reward in _block(values.get("rewards")).items():
        block, place = _block(reward), ("rewards", str(domain))
        parts = _block(block.get("parts"))
        count = block.get("concurrency")
        alone = _reward(
            str(domain),
            block,
            place,
            _texts(block.get("system_envs")),
            count if isinstance(count, int) and not parts else 1,
        )
        several = (
            _reward(str(name), _block(part), (*place, "parts", str(name)), alone.environment, 1)
            for name, part in parts.items()
        )
        yield from (part for part in (alone, *several) if is_path(part.name))


def _reward(
    name: str, block: Mapping[str, Any], place: tuple[str, ...], environment: dict[str, str], concurrency: int
) -> UserPart:
    """Return a reward as a part. Its name is a path if it is the user's, or a built-in with arguments to check."""
    named, arguments = block.get("reward") or name, _block(block.get("reward_args"))
    if arguments and named in known_rewards():
        named = f"roll.rewards.functions.{named}:{named}"
    key = (*place, "reward") if block.get("reward") else place
    return UserPart(
        named, key, (*place, "reward_args"), arguments, None, environment, block.get("group") is True, concurrency
    )


def _block(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> dict[str, str]:
    return {name: text for name, given in _block(value).items() if isinstance(text := variable_text(given), str)}


def ask(parts: Sequence[UserPart], environment: Mapping[str, str]) -> list[InspectedPart]:
    """Check the parts in a child process, and return the result of each.

    If the child ends early or hangs, the part that it was importing has a fault, and a new child checks the remaining
    parts.
    """
    # -P: a folder `roll` in the working directory, as in a clone of ROLL, must not hide this package, so that folder is
    # searched last.
    paths = os.pathsep.join([*(path or os.getcwd() for path in sys.path), os.getcwd()])
    command = [sys.executable, "-P", "-m", "roll.config.load.user_code", str(os.getpid())]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": paths} | dict(environment),
    )
    try:
        answers, errors = process.communicate(json.dumps([asdict(part) for part in parts]), IMPORT_SECONDS)
        code: FaultCode = "failed"
        cause = (
            f"ended the process that imported it, with status {process.returncode}: "
            f"{errors.strip()[-300:] or 'no message'}"
        )
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        answers, _ = process.communicate(timeout=IMPORT_SECONDS)
        code = "timed_out"
        cause = f"was not imported within {IMPORT_SECONDS:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(IMPORT_SECONDS)
    looked = [_decoded(json.loads(line)) for line in answers.splitlines()]
    if len(looked) == len(parts):
        return looked
    guilty, *others = parts[len(looked) :]
    remedy = "fix the module, and move slow code from the module level into its functions"
    fault = Fault(".".join(guilty.place), f"'{guilty.name}' {cause}", remedy, code)
    return [*looked, InspectedPart((fault,), {}), *(ask(others, environment) if others else [])]


def _decoded(said: dict[str, Any]) -> InspectedPart:
    return InspectedPart(tuple(Fault(**fault) for fault in said["faults"]), said["traits"])


REWARD = {False: ("prompt", "response", "row"), True: ("prompt", "responses", "row")}
"""Positional arguments of a reward, by whether it receives a group of responses."""


OTHER_REWARDS = ("completions", "data_source", "extra_info", "ground_truth", "prompts", "solution_str")
"""Positional arguments of rewards of TRL and verl. A function with them would run, and score something else."""


class LenientConfig(StrictConfig):
    """Base for the arguments of a function with `**kwargs`, which accepts any key."""

    model_config = {"extra": "allow"}


class PartRefused(Exception):
    """A part cannot be used. Carries the fault. `problem` follows the part's name."""

    def __init__(self, part: UserPart, problem: str, remedy: str, code: FaultCode) -> None:
        self.fault = Fault(".".join(part.place), f"'{part.name}'{problem}", remedy, code)


def main(parent: int) -> None:
    """Read the parts from stdin, and write a line of JSON for each to stdout. Imported modules write to stderr."""
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
        return [
            *_wrong_values(part.arguments_place, part.arguments, keys),
            only_side_by_side(part.place[1], part.concurrency, [part.name]),
        ], traits
    return list(_wrong_values(part.arguments_place, part.arguments, keys)) or list(_unmade(part, kind, entry)), traits


def _imported(part: UserPart) -> Any:
    name, attribute = split_path(part.name)
    if name == "__main__" or part.kind and name.endswith(".py"):
        problem = f", but {'the program itself' if name == '__main__' else 'a file'} cannot be imported by name"
        if part.kind:
            raise PartRefused(part, f"{problem} in every process", "put it into a module: package.module:Name", "unfit")
        remedy = "give the function itself to roll.train, or put it into a module: package.module:Name"
        raise PartRefused(part, problem, remedy, "not_found")
    try:
        module = imported_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            here = sorted(file.removesuffix(".py") for file in os.listdir() if file.endswith(".py"))
            problem = f", but there is no module '{error.name}'{nearest(error.name, here)}"
            remedy = "use package.module:Name of an installed package, or of a file in the working directory"
            raise PartRefused(part, problem, remedy, "not_found") from error
        raise PartRefused(
            part, f" cannot be imported: {error}", "install the package that the module imports", "not_installed"
        ) from error
    except BaseException as error:  # A module that calls sys.exit() must be a fault, too.
        raise PartRefused(part, f" cannot be imported: {_error_line(error)}", "fix the module", "failed") from error
    if not hasattr(module, attribute):
        known = _own_names(module)
        remedy = (
            f"use one of the names that it defines: {', '.join(known)}"
            if known
            else "define it there; the module defines no name yet"
        )
        raise PartRefused(
            part, f", but the module has no '{attribute}'{nearest(attribute, known)}", remedy, "not_found"
        )
    return getattr(module, attribute)


def _error_line(error: BaseException) -> str:
    """Return the error as one line, with its place in the user's file, if it has one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename not in IMPORTERS]
    has_place = not own or is_of_compilation(error)
    where = "" if has_place else f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _own_names(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    )


def _keys_of_function(part: UserPart, kind: MethodKey | None, entry: Any) -> type[BaseModel]:
    noun, call = (kind.noun, kind.call) if kind else ("a reward", REWARD[part.group])
    form = f"def {split_path(part.name)[1]}({', '.join(call)}, *, a_key: float = 1.0)"
    if not callable(entry) or (kind and inspect.isclass(entry)):
        raise PartRefused(part, f" is a {_type_of(entry)}, but {noun} is a function", f"write it as {form}", "unfit")
    if kind and is_async(entry):
        raise PartRefused(part, " is asynchronous", "make it a plain function, without async", "unfit")
    signature = inspect.signature(entry)
    _check_call(part, signature, call, f"write it as {form}")
    positional = [
        name
        for name, one in signature.parameters.items()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if wrong := _misnamed(positional, call):
        problem = f" has the signature {signature}, but is called by position with {', '.join(call)}"
        raise PartRefused(part, f"{problem}, so that {wrong}", f"write it as {form}", "unfit")
    own = [one for name, one in signature.parameters.items() if name not in positional[: len(call)]]
    return _keys(entry, own)


def _misnamed(positional: Sequence[str], call: tuple[str, ...]) -> str:
    """Return what is wrong with the names of a function that is called by position, "" if nothing is.

    Names that are not known are the author's own.
    """
    for name, given in zip(positional, call, strict=False):
        if name != given and (name in call or name in OTHER_REWARDS):
            return f"'{name}' would be the {given}"
    return ""


def _keys_of_class(part: UserPart, kind: MethodKey, entry: Any) -> type[BaseModel]:
    assert kind.base is not None, "a kind of functions"
    base, form = imported(kind.base), f"a frozen dataclass that derives from {kind.base.replace(':', '.')}"
    remedy = f"write it as {form}, with def __call__(self, {', '.join(kind.call)})"
    if not inspect.isclass(entry) or base not in entry.__mro__:
        raise PartRefused(part, f" is a {_type_of(entry)}, but {kind.noun} is {form}", remedy, "unfit")
    if not dataclasses.is_dataclass(entry) or not entry.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise PartRefused(
            part,
            " is not a frozen dataclass, but only frozen dataclasses can be sent to workers",
            "put @dataclass(frozen=True) above it",
            "unfit",
        )
    if entry.__call__ is base.__call__:
        raise PartRefused(part, " has no __call__ of its own", remedy, "unfit")
    _check_call(part, inspect.signature(entry.__call__), ("self", *kind.call), remedy)
    return _keys(entry, list(inspect.signature(entry).parameters.values()))


def _check_call(part: UserPart, signature: inspect.Signature, call: tuple[str, ...], remedy: str) -> None:
    try:
        bound = signature.bind_partial(*call)
    except TypeError as error:
        problem = f" has the signature {signature}, but is called with {', '.join(call)}: {error}"
        raise PartRefused(part, problem, remedy, "unfit") from error
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
                f" has the signature {signature}, but is called with {', '.join(call)}, without {', '.join(missing)}"
            )
            raise PartRefused(part, problem, remedy, "unfit")


def _type_of(entry: Any) -> str:
    return "class" if inspect.isclass(entry) else type(entry).__name__


def _keys(entry: Callable[..., Any], parameters: list[inspect.Parameter]) -> type[BaseModel]:
    """Return a schema with the parameters as keys. A parameter whose type pydantic cannot check accepts any value."""
    fields: dict[str, Any] = {}
    open_ended = False
    for one in parameters:
        if one.kind is one.VAR_KEYWORD or one.name.startswith("_"):  # pydantic refuses such names
            open_ended = True
        elif one.kind is not one.VAR_POSITIONAL:
            found = _annotation(entry, one)
            default = ... if one.default is one.empty else one.default
            fields[one.name] = (found if default is not None else typing.Optional[found], default)  # noqa: UP045
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of names such as `copy`, which a model has as well
        return create_model("Keys", __base__=LenientConfig if open_ended else StrictConfig, **fields)


def _annotation(entry: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty:
        return Any
    modules = [sys.modules.get(one.__module__) for one in (*reversed(getattr(entry, "__mro__", ())), entry)]
    names = {name: value for module in modules if module for name, value in vars(module).items()}
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
        problem = f" declares {type(traits).__name__}, but is used as {kind.noun}"
        raise PartRefused(part, problem, f"declare {wanted.__name__}", "unfit")
    values = dataclasses.asdict(traits)
    try:
        TypeAdapter(wanted).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f" declares {'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg'].lower()}"
        raise PartRefused(
            part, problem, f"fix the values that it declares in {wanted.__name__}", "not_allowed"
        ) from error
    return values


def argument_faults(
    entry: Callable[..., Any], arguments: Mapping[str, Any], place: tuple[str, ...], given: Sequence[str] = ()
) -> list[Fault]:
    """Return the faults of keyword arguments whose values are not of the types that a class or function annotates.

    Args:
        place: path of the block with the arguments.
        given: names of parameters that are not keys of the block, because roll gives them.
    """
    own = [one for name, one in inspect.signature(entry).parameters.items() if name not in given]
    return list(_wrong_values(place, arguments, _keys(entry, own)))


def _wrong_values(place: tuple[str, ...], arguments: Mapping[str, Any], keys: type[BaseModel]) -> Iterator[Fault]:
    """Yield the faults of a block of arguments, checked within the blocks around it to have full key paths."""
    block, *above = reversed(place)
    root, values = create_model("Block", **{block: (keys, ...)}), {block: arguments}  # type: ignore[call-overload]
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
        yield Fault(".".join(part.arguments_place), problem, "use values that it accepts", "unfit")


if __name__ == "__main__":
    main(int(sys.argv[1]))
