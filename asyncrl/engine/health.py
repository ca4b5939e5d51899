"""Checks that a vLLM engine is alive, answers, and returns from each call in time."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from asyncrl.cluster.stacks import dump_stacks

WATCH_S = 0.2
"""Seconds between two checks that the engine is alive."""
ASK_S = 1.0
"""Seconds between an answer of the engine and the next question to it."""
DUMP_WAIT_S = 1.0
"""Time that the engine's processes have to write their stacks."""


async def watch(engine: Any, timeout_s: float) -> None:
    """Raise an error when the engine is dead, or has not answered for `timeout_s` seconds."""
    await asyncio.gather(_watch_death(engine), _watch_answers(engine, timeout_s))


async def _watch_death(engine: Any) -> None:
    """Raise an error when the engine is dead. vLLM fails its requests then, but not an update or a suspend."""
    while not engine.errored:
        await asyncio.sleep(WATCH_S)
    raise RuntimeError("the engine is dead")


async def _watch_answers(engine: Any, timeout_s: float) -> None:
    """Raise TimeoutError when the engine does not answer. A stopped process looks alive, even while it samples."""
    while True:
        async with limited(timeout_s, "an answer of the engine"):
            await engine.is_sleeping()  # the engine answers between two steps
        await asyncio.sleep(ASK_S)


@contextlib.asynccontextmanager
async def limited(timeout_s: float, action: str, hint: str = "") -> AsyncIterator[None]:
    """Raise TimeoutError after a time, with the stacks of this process and its engine in the log.

    `hint` names a change to make.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        dump_stacks(os.getpid())
        await asyncio.sleep(DUMP_WAIT_S)
        raise TimeoutError(
            f"{action} took more than {timeout_s:.0f} s{hint and f'; {hint}'}"
        ) from None
