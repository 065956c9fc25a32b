"""Passes arrays and scalars of NumPy between the test's process and the candidate's process by value."""

from __future__ import annotations

import re
import sys
from base64 import b64decode, b64encode
from typing import Any

ARRAY, SCALAR = "array", "scalar"
KINDS = re.compile(r"[<>|=][biufcUS]\d+")
"""Data types that are passed: booleans, numbers and text. Arrays of objects are not."""
LARGEST = 8 << 20
"""Bytes of the largest array that is passed by value."""


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy, of no derived class."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is getattr(numpy, "ndarray", None)


def encode_array(value: Any) -> Any:
    """Encode an array or a scalar of NumPy as values of JSON. Return None for other values and for large arrays."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not (
        is_array(value) or (type(value).__module__ == "numpy" and isinstance(value, numpy.generic))
    ):
        return None
    array = numpy.asarray(value)
    if not KINDS.fullmatch(array.dtype.str) or array.nbytes > LARGEST:
        return None
    tag = ARRAY if is_array(value) else SCALAR
    return [tag, [array.dtype.str, list(array.shape), b64encode(array.tobytes()).decode("ascii")]]


def decode_array(tag: str, content: Any) -> Any:
    """Decode a value of `encode_array`. Raises ValueError or TypeError if `content` is none."""
    kind, shape, text = content
    if not isinstance(kind, str) or not KINDS.fullmatch(kind):
        raise ValueError("not a type of arrays")
    try:
        import numpy
    except ImportError as error:
        raise ValueError("there is no NumPy") from error
    raw = bytearray(b64decode(text))
    array = numpy.ndarray(shape, numpy.dtype(kind), raw)
    if array.nbytes != len(raw) or any(size < 0 for size in shape):
        raise ValueError("the shape of an array does not fit its content")
    return array if tag == ARRAY else array[()]
