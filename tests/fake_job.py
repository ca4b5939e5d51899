"""A whole job but for the engine: `fake_job.py [options of train_async.py]`. Responses follow from the tickets' seeds.

With an async ratio above 0 they take a while.
"""

import os
import sys

from fake_worker import run_fake_worker

from asyncrl.job.command_line import parse_config
from train_async import run_job, train


def run_sampler(spec, connection) -> None:
    """Serve a controller."""
    run_fake_worker(spec, connection, token_s=0.02 if spec.config.async_ratio > 0 else 0.0)


def run(words: list[str]) -> None:
    """Run the job, or a rank of it."""
    # with it comes torch, which a worker has no use for
    from asyncrl.job.probe import Probe

    Probe.tokens_at = lambda probe, version: ()  # there is no engine that could score them
    config = parse_config(words)
    run_job(lambda: train(config, run_sampler))


def run_forked(variables: dict[str, str], output_path: str, words: list[str]) -> None:
    """The same in a session of its own, with variables of torchrun; what it prints goes to a file."""
    os.setsid()
    with open(output_path, "w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    os.environ |= variables
    run(words)


def run_unread(variables: dict[str, str], output_path: str, words: list[str]) -> None:
    """The same where nobody reads what it prints: stdout is closed, and the reader of stderr is gone."""
    os.setsid()
    reader, writer = os.pipe()
    os.dup2(writer, sys.stderr.fileno())
    for descriptor in (reader, writer, sys.stdout.fileno()):
        os.close(descriptor)
    sys.stdout = sys.__stdout__ = None  # as Python begins without it
    os.environ |= variables
    run(words)


def run_failing(failing_rank: int, *arguments) -> None:
    """The same, but one rank fails in its first step, in which the others stay; groups are destroyed by all together.

    So it is where collectives are NCCL's.
    """
    import time

    import torch.distributed as dist

    from asyncrl.trainer.policy import Policy

    destroy_alone = dist.destroy_process_group

    def destroy_together() -> None:
        dist.barrier()
        destroy_alone()

    def train_step(policy, updates, policy_version):
        if dist.get_rank() == failing_rank:
            raise RuntimeError(f"rank {failing_rank} is out of memory")
        time.sleep(600)

    Policy.train_step = train_step
    dist.destroy_process_group = destroy_together
    run_forked(*arguments)


def run_without_buffers(end: str, *arguments) -> None:
    """The same, but once there is a file `end`, no weights can be staged any more."""
    from asyncrl.weights.shm import ShmTransport

    find = ShmTransport.try_reserve_buffer
    ShmTransport.try_reserve_buffer = lambda transport: not os.path.exists(end) and find(transport)
    run_forked(*arguments)


if __name__ == "__main__":
    run(sys.argv[1:])
