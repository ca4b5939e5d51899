"""Ranges of a loss's keyword arguments, as annotations in its signature; config.read_value reads them.

A ratio is at most e²⁰, so 1e9 is no limit to it; float32 has no 1e39. What two arguments must be together a loss says
itself, and own_loss.try_loss finds what trains nothing all the same.
"""

from typing import Annotated

Share = Annotated[float, "in [0, 1]", lambda value: 0 <= value <= 1]
BelowOne = Annotated[float, "in [0, 1), where 1 is the ratio of a fresh token", lambda value: 0 <= value < 1]
AtLeastOne = Annotated[int, "in [1, 1e9]", lambda value: 1 <= value <= 1e9]
Count = Annotated[int, "in [0, 1e9]", lambda value: 0 <= value <= 1e9]
Gate = Annotated[float, "in [1e-6, 1e6]", lambda value: 1e-6 <= value <= 1e6]
NonNegative = Annotated[float, "in [0, 1e9]", lambda value: 0 <= value <= 1e9]
Positive = Annotated[float, "in (0, 1e9]", lambda value: 0 < value <= 1e9]
Cap = Annotated[float, "in [1, 1e9], where 1 is the ratio of a fresh token", lambda value: 1 <= value <= 1e9]
AboveOne = Annotated[float, "in (1, 1e9]", lambda value: 1 < value <= 1e9]
