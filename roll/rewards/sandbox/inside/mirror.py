"""Mirrors: proxies in one process for objects of the other, to which they forward operations.

The verdict of a test does not depend on operators that the candidate defines. A mirror and a value of the test have no
operator in common: arithmetic and order raise TypeError, they are unequal, and the value never reaches the candidate.
`==` compares plain data in this process:

- an object whose class derives from a plain type equals a plain value if its content does;
- two mirrors of one class that defines `__eq__` are equal if their attributes are.

`in` fetches all items, and compares here. Operators between two of the candidate's objects, calls, items, `len`, truth
tests and iteration are asked in the candidate's process; the test compares what they return.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from roll.rewards.sandbox.inside.values import MUTABLE

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
    """Return the attributes of an object itself, also those in slots, and its content if its class derives from a plain
    type.
    """
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
        return iter(cls._link.request("operate", "__iter__", cls))

    def __len__(cls) -> int:
        return cls._link.request("operate", "__len__", cls)

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
    """Return whether an item is in a container. All items are fetched first: where the search ends would show the
    candidate the item.
    """
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
