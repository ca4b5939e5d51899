"""Ranges of the keyword arguments of losses, as annotations in their signatures.

A ratio is at most e²⁰, so 1e9 does not limit it; float32 ends below 1e39. A loss itself says which two arguments
exclude each other, and asyncrl/trainer/loss.py refuses what would train nothing.
"""

from typing import Annotated

from msgspec import Meta

_FRESH = "where 1 is the ratio of a fresh token"

Share = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1, description=_FRESH)]
Gate = Annotated[float, Meta(ge=1e-6, le=1e6)]
NonNegative = Annotated[float, Meta(ge=0, le=1e9)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Cap = Annotated[float, Meta(ge=1, le=1e9, description=_FRESH)]
AboveOne = Annotated[float, Meta(gt=1, le=1e9)]
