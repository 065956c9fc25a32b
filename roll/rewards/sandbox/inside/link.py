"""Calls between the test's process and the candidate's process, in both directions.

Plain values are passed by value. If a call changes a list, dict or set that it received, the change is applied to the
caller's object too. Every other object stays in its own process, and the other process holds a proxy of it, called a
mirror (mirror.py).

    test                                candidate
      ── ask call f([3, 1], key=...) ─────▶
      ◀────────── ask call key(3) ─────────   f calls the function that the test passed
      ── value 3 ─────────────────────────▶
      ◀── value None; [3, 1] is now [1, 3] ─
"""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable
from typing import Any

from roll.rewards.sandbox.inside.mirror import (
    OPERATIONS,
    attributes_of,
    is_mirror,
    make_class,
    operators_of,
    plain_base,
)
from roll.rewards.sandbox.inside.values import MUTABLE, decode_plain, encode_plain, overwrite
from roll.rewards.sandbox.inside.wire import Broken, Channel

READABLE = ("__name__", "__qualname__", "__doc__", "__module__")
"""Attributes with an underscore that a guarded end may expose."""
KEPT = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)
"""Types of objects that are never passed to the other process."""
LOOKS = ("plain", "attributes")
"""Requests for an object's content."""
ENDS = (StopIteration, StopAsyncIteration)
"""Exceptions that end a loop of the test. They are raised only when the candidate's iterator ends."""


class Letter:
    """The mutable containers in a request and its answer, by number."""

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self.number: dict[int, int] = {}

    def add(self, container: Any) -> None:
        self.number[id(container)] = len(self.containers)
        self.containers.append(container)


class Link:
    """One end of the connection.

    A guarded end exposes only two things: calls of objects that the test passed, and attributes of objects whose
    classes the test defines. Frames, globals and closures of functions cannot be reached through it.
    """

    def __init__(self, channel: Channel, guarded: bool, others: Callable[[str, Any], Any] | None = None) -> None:
        """
        Args:
            others: handles other kinds of requests. Raises ValueError for an unknown kind.
        """
        self._channel, self._guarded, self._others = channel, guarded, others
        self._exported: list[Any] = []
        self._handles: dict[int, int] = {}
        self._mirrors: dict[int, Any] = {}
        self.acts = 0
        """Number of requests that may have changed an object of the other process. Looking at an object's content
        changes nothing.
        """

    def request(self, kind: str, *parts: Any) -> Any:
        """Send a request and return the other process's answer.

        Raises the exception that was raised there, or Broken if the connection is lost or the answer is malformed.
        """
        letter = Letter()
        self.acts += kind not in LOOKS
        self._channel.send(["ask", kind, [self._write(part, letter) for part in parts]])
        while (message := self._channel.receive())[0] == "ask":
            self._answer(message)
        try:
            _, how, written, changes = message
            for number, content in changes:
                overwrite(letter.containers[number], decode_plain(content, lambda part: self._read(part, letter)))
            result = self._read(written, letter)
        except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, AttributeError, RecursionError) as error:
            self._channel.broken = True
            raise Broken(f"an answer cannot be read: {error}") from error
        if how == "stop":
            if kind == "operate" and parts[0] == "__next__":
                raise StopIteration
            raise RuntimeError("StopIteration")
        if how == "raised":
            raise (
                result if isinstance(result, Exception) and not isinstance(result, ENDS) else RuntimeError(str(result))
            )
        return result

    def serve(self) -> None:
        """Answer requests until the other end closes."""
        while True:
            try:
                self._answer(self._channel.receive())
            except Broken:
                return

    def _answer(self, message: Any) -> None:
        letter = Letter()
        try:
            _, kind, written = message
            parts = [self._read(part, letter) for part in written]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            self._channel.broken = True
            raise Broken(f"a request cannot be read: {error}") from error
        before = [self._content(container, letter) for container in letter.containers]
        try:
            result, how = self._do(kind, parts), "value"
        except StopIteration:
            result, how = None, "stop"
        except Broken:
            raise
        except BaseException as error:
            result, how = error, "raised"
        given = letter.containers[: len(before)]
        try:
            after = [self._content(container, letter) for container in given]
            changes = [[number, content] for number, content in enumerate(after) if content != before[number]]
            self._channel.send(["answer", how, self._write(result, letter), changes])
        except (ValueError, RecursionError, RuntimeError, TypeError) as error:
            self._channel.send(
                ["answer", "raised", self._write(ValueError(f"cannot be passed on: {error}"), Letter()), []]
            )

    def _do(self, kind: str, parts: list[Any]) -> Any:
        if self._guarded and (not parts or id(parts[0]) not in self._handles):
            raise ValueError(
                "this object is not accessible to the candidate"
            )  # classes cannot be called: with `type` a candidate could build an answer that equals anything
        match kind, parts:
            case "call", [target, list() as args, dict() as kwargs]:
                return target(*args, **kwargs)
            case "get", [target, str() as name]:
                self._check(target, name)
                return getattr(target, name)
            case "set", [target, str() as name, value]:
                self._check(target, name)
                return setattr(target, name, value)
            case "delete", [target, str() as name]:
                self._check(target, name)
                return delattr(target, name)
            case "operate", [str() as name, *operands]:
                return OPERATIONS[name](*operands)
            case "plain", [target] if not self._guarded:
                base: Any = plain_base(type(target)) or object
                return base(target)
            case "attributes", [target] if not self._guarded:
                return attributes_of(target)
            case _:
                if self._others is None:
                    raise ValueError(f"unknown request '{kind}'")
                return self._others(kind, parts)

    def _check(self, target: Any, name: str) -> None:
        if not self._guarded or name in READABLE:
            return
        kind = target if isinstance(target, type) else type(target)
        if name.startswith("_") or kind.__module__ != "__main__":
            raise AttributeError(f"{name} is not accessible to the candidate")

    def _content(self, container: Any, letter: Letter) -> Any:
        return encode_plain(container, lambda part: self._write(part, letter))

    def _write(self, value: Any, letter: Letter) -> Any:
        if id(value) in letter.number:
            return ["again", letter.number[id(value)]]
        if type(value) in MUTABLE:
            letter.add(value)
            number = len(letter.containers) - 1
            return ["changeable", [number, self._content(value, letter)]]
        plain = encode_plain(value, lambda part: self._write(part, letter))
        if plain is not None:
            return plain
        if is_mirror(value):
            return ["yours", handle(value)]
        if isinstance(value, KEPT):
            raise ValueError(f"a {type(value).__name__} cannot be passed to the other process")
        if isinstance(value, BaseException):
            return ["error", self._write_error(value)]
        if isinstance(value, type):
            return ["class", self._write_class(value)]
        if inspect.iscoroutine(value):
            return ["coroutine", self._export(value)]
        return ["object", [self._export(value), self._write_class(type(value))]]

    def _write_class(self, kind: type) -> Any:
        parents = [self._write(parent, Letter()) for parent in kind.__bases__ if not is_mirror(parent)]
        return [self._export(kind), kind.__name__, parents, operators_of(kind), plain_base(kind) is not None]

    def _write_error(self, error: BaseException) -> Any:
        kind = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
        args = [part if type(part) in (str, int, float, bool) else str(part) for part in error.args]
        own = None if kind is type(error) else self._write_class(type(error))
        return [self._export(error), own, kind.__name__, args]

    def _export(self, value: Any) -> int:
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._exported)
            self._exported.append(value)
        return self._handles[id(value)]

    def _read(self, written: Any, letter: Letter) -> Any:
        if not isinstance(written, list) or len(written) not in (1, 2):
            raise ValueError("not a value")
        if len(written) == 1:
            return decode_plain(written, lambda part: part)
        tag, content = written
        match tag, content:
            case "again", int():
                return letter.containers[content]
            case "changeable", [int() as number, plain]:
                while len(letter.containers) <= number:
                    letter.containers.append(None)
                value = decode_plain(plain, lambda part: self._read(part, letter))
                letter.containers[number] = value
                letter.number[id(value)] = number
                return value
            case "yours", int():
                return self._exported[content]
            case "error", [int() as known, own, str() as name, list() as args]:
                return self._read_error(known, own, name, args)
            case "class", list():
                return self._read_class(content)
            case "coroutine", int():
                return self._wait_for(content)
            case "object", [int() as known, kind]:
                return self._read_object(known, kind)
        return decode_plain(written, lambda part: self._read(part, letter))

    def _read_object(self, known: int, written: Any) -> Any:
        if known not in self._mirrors:
            kind = self._read_class(written)
            mirror = object.__new__(kind)
            object.__setattr__(mirror, "_handle", known)
            self._mirrors[known] = mirror
        return self._mirrors[known]

    def _read_class(self, written: Any) -> Any:
        known, name, parents, operators, plain = written
        if known not in self._mirrors:
            bases = [self._read(parent, Letter()) for parent in parents]
            usable = tuple(base for base in bases if is_mirror(base) or issubclass(base, BaseException))
            self._mirrors[known] = make_class(self, known, str(name), usable, operators, bool(plain))
        return self._mirrors[known]

    def _read_error(self, known: int, own: Any, name: str, args: list[Any]) -> Any:
        base = getattr(builtins, name, None)
        if not isinstance(base, type) or not issubclass(base, Exception) or issubclass(base, ENDS):
            return RuntimeError(name)
        kind: Any = base if own is None else self._read_class(own)
        try:
            error = kind.__new__(kind, *args) if own is not None else base(*args)
        except TypeError:
            return RuntimeError(f"{name}: {args}")
        if own is not None:
            object.__setattr__(error, "_handle", known)
        return error

    async def _wait_for(self, known: int) -> Any:
        return self.request("await", known)

    def exported(self, handle: int) -> Any:
        """Return the exported object with this number."""
        return self._exported[handle]


def handle(mirror: Any) -> int:
    """Return the number of a mirror's object in the process that exports it."""
    return mirror.__dict__["_handle"]
