"""Ranges of a loss's keyword arguments, as annotations in its signature; config.read_value reads them."""

from typing import Annotated

Share = Annotated[float, "in [0, 1]", lambda value: 0 <= value <= 1]
BelowOne = Annotated[float, "at least 0 and below 1, the ratio of a fresh token", lambda value: 0 <= value < 1]
AtLeastOne = Annotated[int, "at least 1", lambda value: value >= 1]
Count = Annotated[int, "at least 0", lambda value: value >= 0]
NonNegative = Annotated[float, "at least 0", lambda value: value >= 0]
Positive = Annotated[float, "above 0", lambda value: value > 0]
Cap = Annotated[float, "at least 1, the ratio of a fresh token", lambda value: value >= 1]
AboveOne = Annotated[float, "above 1", lambda value: value > 1]
