"""What answers that hang cost the scoring of a step: `python -m tests.chaos --rewards`."""

import asyncio
import time

from asyncrl.engine.reward_pool import RewardPool

RESPONSES = 256
"""Of a default step."""
REPEATS = 3


def hang_or_score(response: str) -> float:
    """Hangs if the response says so."""
    if response == "hang":
        time.sleep(3600)
    return 1.0


async def time_step(share: float, limit_s: float, num_processes: int) -> float:
    """Seconds in which a step's responses are scored, `share` of which hang, in processes that are up."""
    pool = RewardPool("addition", [f"{__file__}:hang_or_score"], limit_s, num_processes)
    await asyncio.gather(*(pool.score("", "good") for _ in range(RESPONSES)))
    hanging = round(share * RESPONSES)
    every = RESPONSES // hanging if hanging else RESPONSES + 1
    began = time.monotonic()
    texts = [
        "hang" if i % every == 0 and i // every < hanging else "good" for i in range(RESPONSES)
    ]
    outcomes = await asyncio.gather(
        *(pool.score("", text) for text in texts), return_exceptions=True
    )
    took_s = time.monotonic() - began
    pool.close()
    assert outcomes.count((1.0, {})) == RESPONSES - hanging
    return took_s


def measure() -> list[dict]:
    """Seconds per step for shares of answers that hang at a limit of 1 s, and numbers of processes."""
    rows = []
    for num_processes in (1, 4, 8):
        for share in (0.0, 0.01, 0.1):
            seconds = [asyncio.run(time_step(share, 1.0, num_processes)) for _ in range(REPEATS)]
            rows.append(
                {
                    "processes": num_processes,
                    "share": share,
                    "limit_s": 1.0,
                    "n": REPEATS,
                    "step_s": seconds,
                }
            )
            print(rows[-1], flush=True)
    return rows
