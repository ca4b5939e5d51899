"""Parts of a job that are broken on purpose. A module: processes that are started find nothing in a script."""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from asyncrl.engine.environments import EnvironmentPool, Environments, MultiTurn, SingleTurn
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.job.command_line import parse_config
from data.environments import GuessNumber
from rollout import run_worker, start_worker
from train_async import run_job, train

RARE = 40
"""One response of so many does harm."""


# Rewards


def hang(response: str) -> None:
    time.sleep(3600)


def fork(response: str) -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(3600)


def allocate(response: str) -> None:
    bytearray(20 << 30)


def leave(response: str) -> None:
    os._exit(0)


def score_badly(answer: str, response: str, harm: Callable) -> float:
    """The number of right characters, and harm now and then."""
    if sum(map(ord, answer + response)) % RARE == 0:
        harm(response)
    return sum(a == b for a, b in zip(answer, response, strict=False)) / max(1, len(answer))


def score_hang(answer, response):
    return score_badly(answer, response, hang)


def score_fork(answer, response):
    return score_badly(answer, response, fork)


def score_allocate(answer, response):
    return score_badly(answer, response, allocate)


def score_leave(answer, response):
    return score_badly(answer, response, leave)


def start_rewards(spec, tokenizer, score: str) -> Environments:
    pool = RewardPool(
        "addition", [f"{__file__}:{score}"], spec.config.env_timeout_s, 4, "rewards 0"
    )
    return Environments(lambda ticket, member: SingleTurn(ticket, tokenizer, pool), pool.close)


# Environments


class Crashing(GuessNumber):
    """Every fifth of its episodes ends the wrong way."""

    def reset(self, *, seed=None, options=None):
        self.way = seed % 25
        return super().reset(seed=seed, options=options)

    def step(self, action):
        match self.way:
            case 0:
                raise KeyError("no\nsuch state")
            case 5:
                return "two", 0.0
            case 10:
                time.sleep(3600)
            case 15:
                return "", float("nan"), True, False, {}
        return super().step(action)


def start_crashing(spec, tokenizer) -> Environments:
    pool = EnvironmentPool(Crashing, tokenizer, spec.config.env_timeout_s)
    return Environments(lambda ticket, member: MultiTurn(pool, ticket.environment_seed))


# Engines


class NanOnce(LLMProxy):
    """Gives a NaN for a log-prob at the first response of version 3, once in the run."""

    def broken(self) -> bool:
        flag = Path(os.environ["CHAOS_FLAG"])
        if self.version < 3 or flag.exists():
            return False
        flag.touch()
        return True

    async def generate(self, *arguments):
        completion = await super().generate(*arguments)
        if self.broken():
            completion.behavior_logprobs[0] = np.nan
        return completion


class NanAlways(NanOnce):
    """Gives a NaN for a log-prob from version 3 on."""

    def broken(self) -> bool:
        return self.version >= 3


class DiesInUpdate(LLMProxy):
    """Its engine is killed when it has got the first part of version 3, once in the run."""

    async def _load(self, version, update_infos, receiving):
        flag = Path(os.environ["CHAOS_FLAG"])
        if version == 3 and not flag.exists():
            flag.touch()
            await self.engine.start_weight_update()
            for process in self.engine.engine_core.resources.engine_manager.processes:
                os.kill(process.pid, signal.SIGKILL)
        await super()._load(version, update_infos, receiving)


FAULTS = {
    "reward-hangs": {"start_environments": functools.partial(start_rewards, score="score_hang")},
    "reward-forks": {"start_environments": functools.partial(start_rewards, score="score_fork")},
    "reward-allocates": {
        "start_environments": functools.partial(start_rewards, score="score_allocate")
    },
    "reward-exits": {"start_environments": functools.partial(start_rewards, score="score_leave")},
    "environment-crashes": {"start_environments": start_crashing},
    "engine-nan-once": {"start_proxy": NanOnce.start},
    "engine-nan-always": {"start_proxy": NanAlways.start},
    "sync-dies": {"start_proxy": DiesInUpdate.start},
}


def run_faulty_worker(fault: str, spec, connection) -> None:
    run_worker(spec, connection, start=functools.partial(start_worker, **FAULTS[fault]))


def main() -> None:
    """Train with the part that the first argument names broken; the options follow."""
    fault, config = sys.argv[1], parse_config(sys.argv[2:])
    run_job(lambda: train(config, functools.partial(run_faulty_worker, fault)))
