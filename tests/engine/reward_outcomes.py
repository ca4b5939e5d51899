"""What becomes of responses that a reward pool scores by the functions of user_rewards.py."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from asyncrl.engine.reward_pool import RewardPool

FILE = str(Path(__file__).with_name("user_rewards.py"))


def texts(*names: str) -> list[str]:
    """Reward functions as --reward names them."""
    return [f"{FILE}:{name}" for name in names]


def outcomes(
    rewards: Sequence[str],
    *responses: str,
    answer: str = "4",
    timeout_s: float = 1.0,
    num_processes: int = 2,
    at_once: bool = True,
) -> list:
    """Return the reward and parts of each response, or the error; asked for at once or one after the other."""

    async def ask() -> list:
        pool = RewardPool("addition", rewards, timeout_s, num_processes)
        groups = [responses] if at_once else [[response] for response in responses]
        found = []
        try:
            for group in groups:
                scores = (pool.score(answer, response) for response in group)
                found += await asyncio.gather(*scores, return_exceptions=True)
            return found
        finally:
            pool.close()

    return asyncio.run(ask())
