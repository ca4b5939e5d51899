"""A whole job with a fault: `faults.py FAULT FIRST [options of train_async.py]`.

From version FIRST on, by FAULT:

none    nothing is wrong
stamps  tokens are stamped with the version after the one that sampled them
half    every other parameter of the engine stays as it was
shift   recorded log-probs are 0.02 nats too low
keys    from the start, engines keep keys and values through updates, whatever --on-update promises

The probe would end such a run. Here it only warns, and the run continues.
"""

import functools
import sys
from dataclasses import replace

from asyncrl.engine import completion, proxy
from asyncrl.job import engine_check, node
from asyncrl.job.command_line import parse_config
from asyncrl.weights.shm import ShmTransport
from rollout import run_worker
from train_async import run_job, train

SHIFT = -0.02
"""Nats."""


class HalfTransport(ShmTransport):
    """Stages every other weight as it was before version `first`."""

    first: int
    kept = ()

    def stage(self, version, parameters):
        weights = [(name, tensor.clone()) for name, tensor in parameters]
        if version < self.first:
            self.kept = weights
        else:
            weights[::2] = self.kept[::2]
        return super().stage(version, weights)


def run_faulty_worker(fault, first, spec, connection) -> None:
    """Serve a controller, with the part of a fault that is the worker's."""
    read_completion, token_versions = proxy.read_completion, completion.token_versions

    def read_shifted(*arguments):
        read = read_completion(*arguments)
        shift = SHIFT * (read.policy_versions >= first)
        return replace(read, behavior_logprobs=read.behavior_logprobs + shift.astype("float32"))

    def stamp_late(output):
        versions = token_versions(output)
        return versions + (versions >= first).astype(versions.dtype)

    if fault == "shift":
        proxy.read_completion = read_shifted
    if fault == "stamps":
        completion.token_versions = stamp_late
    if fault == "keys":
        spec = replace(spec, config=replace(spec.config, on_update="keep"))
    run_worker(spec, connection)


def warn_of_arrival(check) -> None:
    """Warn where the run would end."""
    try:
        check_arrival(check)
    except RuntimeError as error:
        check._leader.run.record_event("warning", text=f"probe: {error}")


check_arrival = engine_check.EngineCheck._check_arrival

if __name__ == "__main__":
    fault, first, *words = sys.argv[1:]
    if fault == "half":
        HalfTransport.first = int(first)
        node.ShmTransport = HalfTransport
    engine_check.EngineCheck._check_arrival = warn_of_arrival
    config = parse_config(words)
    worker_main = functools.partial(run_faulty_worker, fault, int(first))
    run_job(lambda: train(config, worker_main))
