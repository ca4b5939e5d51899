"""A whole job whose tokens are stamped too new: `faults.py FIRST [options of train_async.py]`.

Tokens of version FIRST and later get the version after the one that sampled them. The probe does not see it.
"""

import functools
import sys

from asyncrl.engine import completion
from asyncrl.job.command_line import parse_config
from rollout import run_worker
from train_async import run_job, train


def run_faulty_worker(first, spec, connection) -> None:
    """Serve a controller, and stamp tokens of version `first` and later with the next version."""
    token_versions = completion.token_versions

    def stamp_late(output):
        versions = token_versions(output)
        return versions + (versions >= first).astype(versions.dtype)

    completion.token_versions = stamp_late
    run_worker(spec, connection)


if __name__ == "__main__":
    first, *words = sys.argv[1:]
    config = parse_config(words)
    worker_main = functools.partial(run_faulty_worker, int(first))
    run_job(lambda: train(config, worker_main))
