"""Records as bytes: msgpack of dataclasses, plain values and arrays only.

Pickle would run code from a stranger or a changed file. An array is its dtype, shape and bytes. Its dtype is one of
DTYPES.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np

DTYPES = ("<i8", "|b1", "<f4", "<i4", "|u1", "<u2")
"""Dtypes of the arrays in records. Other dtypes are refused."""


def encode(value: object, write: Callable[..., bytes] = msgspec.msgpack.encode) -> bytes:
    """Return a record as bytes. Raises TypeError for other types, for example an array of another dtype.

    Code points that UTF-8 lacks are written as in JSON: \\ud83d. A user's data, an error's message or a path can have
    half of a character. It must not end a run.
    """
    try:
        return write(value, enc_hook=_to_plain)
    except UnicodeEncodeError:
        return write(_escape(value))


def _escape(value: object) -> object:
    plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_to_plain)
    match plain:
        case str():
            return plain.encode(errors="backslashreplace").decode()
        case dict():
            return {_escape(key): _escape(item) for key, item in plain.items()}
        case list() | tuple():
            return [_escape(item) for item in plain]
    return plain


def decode(kind: type, data: bytes) -> object:
    """Return the record of a type from its bytes. Its arrays are read-only.

    Raises ValueError if the bytes are no record of the type.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_to_array)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # Lists nested in lists end in RecursionError.
        raise ValueError(f"a broken {getattr(kind, '__name__', kind)}: {error}") from None


def _to_plain(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype.str in DTYPES:
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"{type(value).__name__}, dtype {getattr(value, 'dtype', None)}, is not written"
    )


def _to_array(kind: type, value: object) -> np.ndarray:
    if kind is not np.ndarray:
        raise TypeError(f"{kind} is not read")
    match value:
        case [str(dtype), [*shape], bytes(data)] if dtype in DTYPES and all(
            type(n) is int and n >= 0 for n in shape
        ):
            is_whole = len(data) == math.prod(shape) * np.dtype(dtype).itemsize
            # numpy would sum other bytes than 0 and 1.
            if is_whole and (dtype != "|b1" or not data.translate(None, b"\0\1")):
                return np.frombuffer(data, dtype).reshape(shape)
    raise ValueError("an array is dtype, shape and as many bytes as these have")
