"""Calls between the test's process and the candidate's process, in both directions.

Plain values are passed by value. If a call changes a list, dict or set that it received, the change is applied to the
caller's object too. Every other object stays in its own process, and the other process holds a proxy of it, called a
mirror, which forwards operations to it.

    test                                candidate
      ── ask call f([3, 1], key=...) ─────▶
      ◀────────── ask call key(3) ─────────   f calls the function that the test passed
      ── value 3 ─────────────────────────▶
      ◀── value None; [3, 1] is now [1, 3] ─

The verdict of a test does not depend on operators that the candidate defines. A mirror and a value of the test have no
operator in common: arithmetic and order raise TypeError, they are unequal, and the value never reaches the candidate.
`==` compares plain data in this process:

- an object whose class derives from a plain type equals a plain value if its content does;
- two mirrors of one class that defines `__eq__` are equal if their attributes are.

`in` fetches all items, and compares here. Operators between two of the candidate's objects, calls, items, `len`, truth
tests and iteration are asked in the candidate's process; the test compares what they return.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from roll.rewards.sandbox.inside.arrays import ARRAY, SCALAR, decode_array, encode_array, is_array
from roll.rewards.sandbox.inside.wire import Broken, Channel

BINARY = {
    **{
        f"__{name}__": getattr(operator, f"__{name}__")
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
    },
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("and", "or", "xor", "lshift", "rshift")},
    "__divmod__": divmod,
}
COMPARED = {f"__{name}__": getattr(operator, f"__{name}__") for name in ("lt", "le", "gt", "ge")}


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda mine, other: function(other, mine)


REFLECTED = {f"__r{name[2:]}": _reflected(function) for name, function in BINARY.items()}
JUDGED = BINARY | REFLECTED | COMPARED
"""Operators whose other operand may be a test's expected value. Never asked with such a value."""
ASKED: dict[str, Callable[..., Any]] = {
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__reversed__": reversed,
    "__bool__": bool,
    "__hash__": hash,
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "__int__": int,
    "__float__": float,
    "__index__": operator.index,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__abs__": abs,
    "__invert__": operator.invert,
    "__round__": round,
    "__enter__": lambda manager: type(manager).__enter__(manager),
    "__exit__": lambda manager, kind, error: bool(type(manager).__exit__(manager, kind, error, None)),
}
OPERATIONS: dict[str, Callable[..., Any]] = {**JUDGED, **ASKED}
ALWAYS = ("__hash__", "__str__", "__repr__")
"""Operations that every object has. Every mirror forwards them."""
OF_RAISED = ("__traceback__", "__context__", "__cause__", "__suppress_context__", "__notes__")
"""Attributes that Python sets when an exception is raised."""
PLAIN = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset)


def operators_of(kind: type) -> list[str]:
    """Return the operators that a class defines and its mirrors must forward."""
    own = [name for name in (*JUDGED, *ASKED) if name not in ALWAYS and getattr(kind, name, None) is not None]
    compared = [name for name in COMPARED if getattr(kind, name, None) is getattr(object, name)]
    equal = ["__eq__"] if getattr(kind, "__eq__", None) is not object.__eq__ else []
    return [name for name in own if name not in compared] + equal + (["__call__"] if hasattr(kind, "__call__") else [])  # noqa: B004


def attributes_of(target: Any) -> dict[str, Any]:
    """Return an object's own attributes, also those in slots, and its content if it derives from a plain type."""
    slots = [name for kind in type(target).__mro__ for name in _slots(kind) if hasattr(target, name)]
    base: Any = plain_base(type(target))
    content = {"": base(target)} if base else {}
    return {**content, **{name: getattr(target, name) for name in slots}, **getattr(target, "__dict__", {})}


def _slots(kind: type) -> tuple[str, ...]:
    named = kind.__dict__.get("__slots__", ())
    return tuple(
        name for name in ([named] if isinstance(named, str) else named) if name not in ("__dict__", "__weakref__")
    )


def plain_base(kind: type) -> type | None:
    """Return the plain type that a class derives from, or None."""
    return next((base for base in PLAIN if issubclass(kind, base)), None)


class MirrorClass(type):
    """The class of the mirrors of one class. It forwards calls, attribute access and iteration of the class itself."""

    _link: Any
    _handle: int

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if "_handle" not in namespace:
            raise TypeError(f"{name}: a test cannot derive a class from a class of the candidate")
        return super().__new__(cls, name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._link.request("call", cls, list(args), kwargs)

    def __getattr__(cls, name: str) -> Any:
        return cls._link.request("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._link.request("set", cls, name, value)

    def __iter__(cls) -> Any:
        return _items(cls)

    def __len__(cls) -> int:
        return _length(cls)

    def __getitem__(cls, key: Any) -> Any:
        return cls._link.request("operate", "__getitem__", cls, key)

    def __contains__(cls, item: Any) -> bool:
        return _has(cls, item)


class Mirror(metaclass=MirrorClass):
    """A proxy for an object of the other process."""

    _link: Any = None
    _handle: int = 0
    _base: bool = False
    """Whether the object derives from a plain type."""
    _defines_eq: bool = False
    """Whether the object's class defines `__eq__`."""

    def _plain(self) -> Any:
        """Return the object's plain content. Raises TypeError if there is none.

        An immutable content is fetched only once, a mutable one again only after a request that may have changed it. So
        an object that counts how often it is looked at shows the same content to all comparisons.
        """
        acts, content = self.__dict__.get("_content", (-1, None))
        if acts < 0 or (isinstance(content, MUTABLE) and acts != self._link.acts):
            content = self._link.request("plain", self)
            if is_mirror(content):
                raise TypeError("an object that derives from a plain type has no plain content")
            object.__setattr__(self, "_content", (self._link.acts, content))
        return content

    def __contains__(self, item: Any) -> bool:
        return item in self._plain() if self._base else _has(self, item)

    def __getattr__(self, name: str) -> Any:
        return self._link.request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OF_RAISED:
            return object.__setattr__(self, name, value)
        return self._link.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._link.request("delete", self, name)

    def __eq__(self, other: Any) -> Any:
        if self is other:
            return True
        if not is_mirror(other):
            return self._plain() == other if self._base else NotImplemented
        if type(self) is not type(other) or not self._defines_eq:
            return self._base and other._base and self._plain() == other._plain()
        return self._link.request("attributes", self) == self._link.request("attributes", other)

    def __ne__(self, other: Any) -> Any:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __hash__(self) -> int:
        return self._link.request("operate", "__hash__", self)

    def __str__(self) -> str:
        return str(self._link.request("operate", "__str__", self))

    def __repr__(self) -> str:
        return str(self._link.request("operate", "__repr__", self))


def _has(container: Any, item: Any) -> bool:
    """Return whether an item is in a container. All items are fetched first, to hide where the search ends."""
    return item in list(container)


def is_mirror(value: Any) -> bool:
    """Return whether a value is a proxy for an object or a class of the other process."""
    return isinstance(type(value), MirrorClass) or isinstance(value, MirrorClass)


def make_class(link: Any, handle: int, name: str, bases: tuple[type, ...], operators: list[str], base: bool) -> type:
    """Return the class for the mirrors of a class's objects."""
    namespace: dict[str, Any] = {"_link": link, "_handle": handle, "_base": base, "__module__": "solution"}
    namespace["_defines_eq"] = "__eq__" in operators
    for operation in operators:
        if operation == "__call__":
            namespace["__call__"] = _call
        elif operation in JUDGED:
            namespace[operation] = _judged(operation)
        elif operation == "__len__":
            namespace["__len__"] = _length
        elif operation == "__iter__" and "__len__" in operators:
            namespace["__iter__"] = _items
        elif operation in ASKED:
            namespace[operation] = _operation_method(operation)
    if not any(isinstance(parent, MirrorClass) for parent in bases):
        bases = (*(parent for parent in bases if parent is not object), Mirror)
    try:
        return MirrorClass(name, bases, namespace)
    except TypeError:  # the bases have no consistent order, or conflicting memory layouts
        return MirrorClass(name, (Mirror,), namespace)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._link.request("call", self, list(args), kwargs)


def _operation_method(operation: str) -> Callable[..., Any]:
    def ask(self: Any, *args: Any) -> Any:
        if operation == "__exit__":
            args = (args[0], args[1])  # tracebacks are not sent
        return self._link.request("operate", operation, self, *args)

    return ask


def _length(self: Any) -> int:
    """Return the object's length, which is asked again only after a request that may have changed the object."""
    acts, length = self.__dict__.get("_length", (-1, 0))
    if acts != self._link.acts:
        length = self._link.request("operate", "__len__", self)
        keep = type.__setattr__ if isinstance(self, type) else object.__setattr__
        keep(self, "_length", (self._link.acts, length))
    return length


def _items(self: Any) -> Iterator[Any]:
    """Yield the object's items. Raises RuntimeError if they are fewer than its length.

    Without some of its items, it would pass tests of all its items.
    """
    try:
        length = len(self)
    except TypeError:  # a class, which may have no length
        length = 0
    count = 0
    for item in self._link.request("operate", "__iter__", self):
        yield item
        count += 1
    if count < length:
        raise RuntimeError(f"an object of length {length} has only {count} items")


def _judged(operation: str) -> Callable[[Any, Any], Any]:
    def judge(self: Any, other: Any) -> Any:
        if is_mirror(other):
            return self._link.request("operate", operation, self, other)
        if self._base:
            return JUDGED[operation](self._plain(), other)
        if operation in COMPARED:
            return NotImplemented
        raise TypeError(
            f"{operation}: an object of the candidate's own class and a value of the test have no operators"
        )

    return judge


Encode = Callable[[Any], Any]
MUTABLE = (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
"""Types whose values a call may change. The changes are applied to the caller's object too."""
BY_TEXT: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*map(float, parts))),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*map(int, parts))),
    "Decimal": (Decimal, str, lambda text: Decimal(str(text))),
    "Fraction": (Fraction, str, lambda text: Fraction(str(text))),
    "datetime": (datetime, datetime.isoformat, lambda text: datetime.fromisoformat(text)),
    "date": (date, date.isoformat, lambda text: date.fromisoformat(text)),
    "timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*map(int, parts)),
    ),
}
"""By tag: the type, its encoder to values of JSON, and its decoder."""
TAG_OF = {kind: tag for tag, (kind, _, _) in BY_TEXT.items()}
SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytearray": bytearray,
    "deque": deque,
}
MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": dict,
}


def encode_plain(value: Any, encode: Encode) -> Any:
    """Encode a value of exactly one of the plain types, its items by `encode`. Return None for others.

    Arrays and scalars of NumPy are plain too.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return [value]
    if kind in TAG_OF:
        tag = TAG_OF[kind]
        return [tag, BY_TEXT[tag][1](value)]
    if kind.__name__ in SEQUENCES and kind in (list, tuple, set, frozenset, bytearray, deque):
        return [kind.__name__, [encode(item) for item in value]]
    if kind in (dict, OrderedDict, Counter, defaultdict):
        return [kind.__name__, [[encode(key), encode(item)] for key, item in value.items()]]
    if kind is slice:
        return ["slice", [encode(value.start), encode(value.stop), encode(value.step)]]
    if value is Ellipsis or value is NotImplemented:
        return ["builtin", repr(value)]
    if isinstance(value, type) and value.__module__ == "builtins" and getattr(builtins, value.__name__, None) is value:
        return ["builtin", value.__name__]
    return encode_array(value)


def decode_plain(written: Any, decode: Encode) -> Any:
    """Decode a value of `encode_plain`, its items by `decode`. Raises ValueError if `written` is none."""
    if len(written) == 1:
        if written[0] is None or isinstance(written[0], bool | int | float | str):
            return written[0]
        raise ValueError("not a value")
    tag, content = written
    if tag in BY_TEXT:
        return BY_TEXT[tag][2](content)
    if tag in (ARRAY, SCALAR):
        return decode_array(tag, content)
    if tag in SEQUENCES:
        return SEQUENCES[tag](decode(item) for item in content)
    if tag == "defaultdict":
        return defaultdict(None, ((decode(key), decode(item)) for key, item in content))
    if tag in MAPPINGS:
        return MAPPINGS[tag]({decode(key): decode(item) for key, item in content})
    if tag == "slice":
        return slice(*(decode(part) for part in content))
    found = getattr(builtins, content, None) if tag == "builtin" and isinstance(content, str) else None
    if isinstance(found, type) or found is Ellipsis or found is NotImplemented:
        return found
    raise ValueError(f"'{tag}' is not a kind of value")


def overwrite(old: Any, new: Any) -> None:
    """Replace the content of a container `old`, of a type in MUTABLE or an array, with the content of `new`."""
    if is_array(old):
        old[...] = new
    elif isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    else:
        old.clear()
        old.update(new)


READABLE = ("__name__", "__qualname__", "__doc__", "__module__")
"""Attributes with an underscore that a guarded end may expose."""
KEPT = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)
"""Types of objects that are never passed to the other process."""
LOOKS = ("plain", "attributes")
"""Requests for an object's content."""
SHOWN = ("__len__", "__iter__", "__bool__", "__hash__", "__int__", "__float__", "__index__", "__str__", "__repr__")
"""Operations that do not change an object."""
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
        """Number of requests that may have changed an object of the other process. Looking changes nothing."""

    def request(self, kind: str, *parts: Any) -> Any:
        """Send a request and return the other process's answer.

        Raises the exception that was raised there, or Broken if the connection is lost or the answer is malformed.
        """
        letter = Letter()
        self.acts += kind not in LOOKS and not (kind == "operate" and parts[0] in SHOWN)
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
            # Classes cannot be called: with `type` a candidate could build an answer that equals anything.
            raise ValueError("this object is not accessible to the candidate")
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
        if type(value) in MUTABLE or is_array(value):
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
