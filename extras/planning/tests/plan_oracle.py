"""What tests of planning share: the time of a step, and what a plan promises, by the arithmetic of those who run it."""

import dataclasses
import re
import shlex
from collections import Counter

import pytest

from asyncrl.cluster.cluster import check_shares
from asyncrl.cluster.placement import place
from asyncrl.job.command_line import parse_config
from extras.planning import memory, planner
from extras.planning.fit import plan_memory
from extras.planning.plan import commands, planned_config


def drawn(rng, choices) -> dict:
    """One of the values of each name."""
    return {name: rng.choice(values) for name, values in choices.items()}


def least_seconds(generation_s, train_s, tail_s, alpha):
    """A step's seconds at least; there are 1 + α places for a batch."""
    return max(generation_s, train_s, (generation_s + train_s + tail_s) / (1 + alpha))


def most_seconds(generation_s, train_s, longest_s, alpha):
    """A step's seconds at most: proposition 2 of the paper, and ours for 0 < α < 1."""
    if alpha == 0:
        return generation_s + longest_s + train_s
    most_s = max(generation_s + longest_s / (1 + alpha), train_s)
    return most_s if alpha >= 1 else max(most_s, (generation_s + longest_s + train_s) / (1 + alpha))


def number_after(option, command, default):
    match = re.search(rf"{option} (\d+)", command)
    return int(match[1]) if match else default


def check_plan(plan, cluster):
    """Whoever runs the commands of a plan accepts them, and they start the ranks and engines that are planned, on GPUs
    on which these fit; no step may be doubtful. A run without others that join it is predicted to be as fast.
    """
    split, config, engines = plan.split, planned_config(plan), Counter()
    trainer, *hosts = commands(plan)
    pool, num_gpus, placement = check_trainer(trainer, split, config, cluster)
    for worker in placement.workers:
        engines[pool, worker.num_gpus] += split.training.machines
    for line in hosts:
        host_pool, count, workers = check_host(line, split, config, cluster)
        for worker in workers:
            engines[host_pool, worker.num_gpus] += count
    planned_engines = Counter()
    for _, engine, count in plan.engines:
        planned_engines[engine.pool, engine.tp] += count
    assert engines == planned_engines
    assert (config.listen is None) == (not hosts)
    takes_turns = split.colocate is not None and config.async_ratio == 0
    assert (config.colocate == "sleep") == takes_turns
    if config.listen is None:
        nodes = dataclasses.replace(pool, count=split.training.machines, gpus=num_gpus)
        check_prediction(plan, config, dataclasses.replace(cluster, pools=(nodes,)), placement)
    return config


def check_trainer(line, split, config, cluster):
    """Check the command of the trainer. Returns its pool, GPUs of a machine that it sees, and its placement."""
    training, command = split.training, line["command"]
    words = shlex.split(command)
    assert parse_config(words[words.index("train_async.py") + 1 :]) == config
    pool, count = machines_of(line, cluster)
    assert number_after("--nproc-per-node", command, None) == training.gpus
    assert number_after("--nnodes", command, 1) == count == training.machines
    check_shares(config, training.machines, training.ranks)
    num_gpus = visible_gpus(command, pool)
    sharing = memory.Sharing(training.ranks, training.shards)
    placement = place(config, num_gpus, 64, training.gpus)
    gpus = [pool.device] * num_gpus
    placement, arithmetic = plan_memory(config, placement, split.job.shape, gpus, sharing)
    assert "warning" not in arithmetic
    return pool, num_gpus, placement


def check_host(line, split, config, cluster):
    """Check the command of hosts that join. Returns their pool, how many they are, and the workers of each."""
    command = line["command"]
    assert "rollout.py --join HOST0:" in command
    pool, count = machines_of(line, cluster)
    tp = number_after("--rollout-tp", command, config.rollout_tp)
    joins = {"num_rollout_workers": None, "weight_sync": "auto", "rollout_tp": tp}
    joined = dataclasses.replace(config, **joins)
    memory.plan_alone(joined, split.job.shape, pool.device)
    return pool, count, place(joined, visible_gpus(command, pool), 64, 0).workers


def check_prediction(plan, config, cluster, placement):
    """A placement on these nodes alone is predicted to take as long as its plan says."""
    split = plan.split
    job = dataclasses.replace(split.job, config=config)
    predicted = planner.of_placement(job, cluster, placement)
    assert predicted.split.training_s == pytest.approx(split.training_s)
    assert predicted.generation_s == pytest.approx(plan.generation_s)
    times = predicted.update_s / plan.update_s
    assert 1 - 1e-6 <= times <= len(placement.workers) + 1e-6


def machines_of(line, cluster):
    """The pool of the machines that a command is for, and how many they are."""
    count, _, name = line["machines"].partition(" × ")
    (pool,) = (pool for pool in cluster.pools if pool.name == name)
    return pool, int(count)


def visible_gpus(command, pool) -> int:
    """GPUs that a command sees on a machine."""
    visible = re.match(r"CUDA_VISIBLE_DEVICES=(\S+)", command)
    return len(visible[1].split(",")) if visible else pool.gpus
