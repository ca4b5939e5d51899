"""A loss's keyword arguments as text: their types and ranges are the annotations in its signature."""

import math
from typing import Annotated, Any, get_args, get_origin

Share = Annotated[float, "in [0, 1]", lambda value: 0 <= value <= 1]
NonNegative = Annotated[float, "at least 0", lambda value: value >= 0]
Positive = Annotated[float, "above 0", lambda value: value > 0]
Cap = Annotated[float, "at least 1, the ratio of a fresh token", lambda value: value >= 1]
AboveOne = Annotated[float, "above 1", lambda value: value > 1]

_IN_WORDS = {float: "a finite number", int: "a whole number"}


def read_value(text: str, kind: Any) -> Any:
    """Return `text` as a `kind`: float, int, bool, str, a Literal, one of them or None, or with a range, as above.

    Raises ValueError that says what is allowed.
    """
    options = get_args(kind)
    if type(None) in options:
        return read_value(text, options[0])
    if get_origin(kind) is Annotated:
        kind, words, is_allowed = options
        value = read_value(text, kind)
        if not is_allowed(value):
            raise ValueError(f"must be {words}")
        return value
    if kind is bool or options:
        choices = {"true": True, "false": False} if kind is bool else {str(option): option for option in options}
        if text not in choices:
            raise ValueError(f"must be {' or '.join(choices)}")
        return choices[text]
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if kind is not str and not math.isfinite(value):
        raise ValueError(f"must be {_IN_WORDS[kind]}")
    return value
