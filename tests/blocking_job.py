"""A job as NCCL would block it, over gloo: `torchrun tests/blocking_job.py RANK [options of train_async.py]`.

Rank RANK fails in its first step, and the others wait for it where no signal's handler runs. A process group is
destroyed only by all ranks together.
"""

import ctypes
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch.distributed as dist  # noqa: I001  the path comes first
from fake_job import run_sampler
from asyncrl.cluster import processes
from asyncrl.job.command_line import parse_config
from asyncrl.job.probe import Probe
from asyncrl.trainer.policy import Policy
from train_async import train

destroy_alone = dist.destroy_process_group


def wait_for_ever() -> None:
    """Stand in the kernel, as a thread does that waits for a GPU: it locks a mutex twice."""
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def destroy_together() -> None:
    """Return when all ranks have called this."""
    dist.barrier()
    destroy_alone()


if __name__ == "__main__":
    failing_rank = int(sys.argv.pop(1))

    def train_step(policy, updates, policy_version):
        if dist.get_rank() == failing_rank:
            raise RuntimeError(f"rank {failing_rank} is out of memory")
        wait_for_ever()

    Probe.tokens_at = lambda probe, version: ()
    Policy.train_step = train_step
    dist.destroy_process_group = destroy_together
    config = parse_config(sys.argv[1:])
    processes.STUCK_S = 1.0  # the other rank has nothing to tidy up
    processes.run_job(lambda: train(config, run_sampler))
