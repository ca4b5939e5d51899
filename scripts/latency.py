"""train_async.py with environments whose steps take a simulated time, or fail, for studies.

    torchrun --standalone scripts/latency.py "normal:10,5 fail:0.01 scale:0.01" [options of train_async.py]

The law is in seconds: `normal:MU,SIGMA`, `lognormal:MU,SIGMA` or `constant:S`. `fail:P` is the share of steps that hang
or crash. `scale:F` is a factor on the seconds. Evaluations are not delayed.
"""

import asyncio
import functools
import random
import sys
from collections.abc import Callable

from asyncrl.cluster.placement import WorkerSpec
from asyncrl.cluster.processes import run_job
from asyncrl.cluster.streams import keep_printing
from asyncrl.engine.environments import Environment, Environments, Step, start_environments
from asyncrl.engine.rewards import Failed
from asyncrl.job.command_line import parse_config
from asyncrl.records import Completion, Ticket
from extras.latency_law import LAWS_HINT, LatencyLaw
from rollout import run_worker, start_worker
from train_async import train


def delay_steps(environment: Environment, law: LatencyLaw, timeout_s: float, seed: int) -> None:
    """Let each step of an environment take a simulated latency, or fail."""
    step, draws = environment.step, random.Random(seed)

    async def step_late(turn: Completion) -> Step:
        delay = law.draw(draws)
        if delay.failure == "crash":
            raise Failed("simulated crash")
        if delay.failure == "hang" or delay.seconds > timeout_s:
            await asyncio.sleep(timeout_s)
            raise Failed(f"simulated latency: timed out after {timeout_s:g} s")
        await asyncio.sleep(delay.seconds)
        return await step(turn)

    environment.step = step_late


def start_delayed(spec: WorkerSpec, tokenizer, law: LatencyLaw) -> Environments:
    """The environments of a worker's task, delayed where they are trained on."""
    environments = start_environments(spec, tokenizer)

    def make_environment(ticket: Ticket, member: int) -> Environment:
        environment = environments.make_environment(ticket, member)
        if not ticket.is_evaluation:
            delay_steps(environment, law, spec.config.env_timeout_s, ticket.seed + member)
        return environment

    return Environments(make_environment, environments.close)


def run_latency_worker(law: str) -> Callable:
    """Return the function that a worker's process runs with this law. Raises ValueError for an unreadable law."""
    delayed = functools.partial(start_delayed, law=LatencyLaw.parse(law))
    return functools.partial(
        run_worker, start=functools.partial(start_worker, start_environments=delayed)
    )


def run() -> None:
    """Read the law, then the options, and train. Raises ValueError if there is no law."""
    keep_printing()
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise ValueError(f"the law comes first, before the options; {LAWS_HINT}")
    law, config = sys.argv[1], parse_config(sys.argv[2:])
    train(config, run_latency_worker(law))


if __name__ == "__main__":
    run_job(run)
