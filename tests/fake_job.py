"""A whole job but for the engine: `fake_job.py [options of train_async.py]`. Responses follow from the tickets' seeds.

With an async ratio above 0 they take a while.
"""

import sys

from fake_worker import TOKEN_S, FakeWorker

from asyncrl.job.command_line import parse_config
from train_async import run_job, train


def run_sampler(spec, connection) -> None:
    """Serve a controller."""
    FakeWorker(spec, connection, TOKEN_S if spec.config.async_ratio > 0 else 0.0).serve()


if __name__ == "__main__":
    # with it comes torch, which a worker has no use for
    from asyncrl.job.probe import Probe

    Probe.tokens_at = lambda probe, version: ()  # there is no engine that could score them
    config = parse_config(sys.argv[1:])
    run_job(lambda: train(config, run_sampler))
