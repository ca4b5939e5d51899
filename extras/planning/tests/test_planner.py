"""The planner: its costs by their formulas, and its choice against brute force on small random clusters."""

import dataclasses
import itertools
import math
import random
from collections import Counter

import pytest
from plan_oracle import check_plan, drawn, least_seconds, most_seconds
from qwen3_models import folder_of, shape_of

from asyncrl.config import Config
from extras.planning import memory, planner
from extras.planning.planner import (
    Cluster,
    Job,
    Lengths,
    Pool,
    largest_engine,
    make_engine,
    plan,
    training_s,
    trainings,
)

LENGTHS = Lengths.of(100, [200, 400, 900], 32)
LONGEST = 900 - 500 * (2 / 3) ** 32 - 200 * (1 / 3) ** 32
"""Mean tokens of the longest of 32 responses, each of which has 200, 400 or 900."""
CONFIG = Config(
    max_prompt_tokens=128,
    max_response_tokens=900,
    groups_per_step=8,
    group_size=4,
    max_running_requests=8,
    max_tokens_per_microbatch=4112,
)


def pool(name="fast", count=1, gpus=2, **changes) -> Pool:
    pool = Pool(name, name, count, gpus, 2.0, 100.0, 1000.0, 80.0, 100.0)
    return dataclasses.replace(pool, **changes)


def job(size="0.6b", **options) -> Job:
    config = dataclasses.replace(CONFIG, model=folder_of(size), **options)
    return Job(config, shape_of(size), LENGTHS)


def cluster(*pools, same_kind=5.0, across_kinds=1.5) -> Cluster:
    return Cluster(pools, same_kind, across_kinds)


# Brute force: every trainer, every set of other machines, every number of engines on each


def rate_of(j, numbers):
    """Tokens/s of so many engines on each pool and tp, if each request goes to who has the fewest and room for it."""
    largest = {kind: largest_engine(j, *kind) for kind in numbers}
    if not all(largest.values()):
        return 0.0
    most = {kind: engine.requests for kind, engine in largest.items()}
    low, high = 0.0, float(max(most.values()))
    for _ in range(60):
        level = (low + high) / 2
        taken = sum(count * min(level, most[kind]) for kind, count in numbers.items())
        low, high = (level, high) if taken <= j.requests else (low, level)
    return sum(
        count * make_engine(j, *kind, min(low, most[kind])).rate for kind, count in numbers.items()
    )


def seconds_of_step(j, busy_s, train_s, kinds, alpha):
    """`kinds` are the pools and tps of the engines; the fastest ends the longest response, alone."""
    alone_s = min(make_engine(j, *kind, 1).decode_s for kind in kinds)
    return least_seconds(busy_s, train_s, (LONGEST - 500) * alone_s, alpha)


def outcomes(j, c):
    """(seconds of a step, price per hour) of every plan; those of a GPU that both sides share are the planner's."""
    tps = [tp for tp in (1, 2, 4, 8) if memory.can_split(j.shape, tp)]
    weights = 2 * j.shape.num_parameters / 1e9
    alpha = j.config.async_ratio
    for p in c.pools:
        for split in planner.shared_splits(j, p):
            (site,) = split.sites
            load_s = 0.31e-3 * j.shape.num_tensors
            busy_s = j.tokens / site.engines[0].rate + max(site.update_s, load_s)
            yield seconds_of_step(j, busy_s, split.training_s, [(p, 1)], 0.0), p.price_per_hour
        trainers = itertools.product(range(1, p.count + 1), range(1, p.gpus + 1), (False, True))
        for machines, gpus, stages in trainers:
            times_s = [training_s(j, c, t) for t in trainings(j, p, machines, gpus, stages)]
            if j.config.groups_per_step % machines or not times_s:
                continue
            # engines beside the trainer are the same on all of its machines
            sites = [(p, machines, machines, (p.gpus - gpus) * stages, weights / p.gb_per_s)]
            for q in c.pools:
                link = c.same_kind if q.gpu == p.gpu else c.across_kinds
                sites.append((q, 1, q.count - machines * (q is p), q.gpus, 5 * weights / link))
            choices = [
                [
                    ((q, tp), number, update_s)
                    for tp in tps
                    for number in range(step, count * (per_machine // tp) + 1, step)
                ]
                for q, step, count, per_machine, update_s in sites
            ]
            for chosen_engines in itertools.product(*([None, *choice] for choice in choices)):
                engines = Counter()
                update_s = 0.31e-3 * j.shape.num_tensors
                for kind, number, seconds in filter(None, chosen_engines):
                    engines[kind] += number
                    update_s = max(update_s, seconds)
                rate = 0 < engines.total() <= j.requests and rate_of(j, engines)
                if not rate:
                    continue
                busy_s = j.tokens / rate + update_s
                used = sum(q.price_per_hour * tp * n for (q, tp), n in engines.items())
                step_s = seconds_of_step(j, busy_s, min(times_s), engines, alpha)
                yield step_s, used + machines * gpus * p.price_per_hour


SMALL_CLUSTERS = (
    [(1, 1)],
    [(1, 8)],
    [(2, 2)],
    [(3, 1), (1, 2)],
    [(2, 1), (1, 3)],
    [(1, 2), (1, 2), (1, 1)],
)
"""Number of machines and GPUs of each, by kind."""


SHEET = {
    "price_per_hour": (0.0, 0.5, 1.0, 2.0, 5.0),
    "tflops": (60, 150, 400, 1000),
    "hbm_gb_per_s": (300, 900, 2000, 5000),
    "memory_gib": (16.0, 24.0, 48.0, 80.0),
    "gb_per_s": (32.0, 200.0, 450.0),
}
LINKS = {"same_kind": (1.25, 5.0, 50.0), "across_kinds": (0.1, 1.25, 10.0)}
OPTIONS = {
    "async_ratio": (0.0, 0.5, 1.0, 2.0),
    "max_running_requests": (2, 8, 64),
    "share_prefix": ("off", "prompt"),
    "max_tokens_per_microbatch": (4112, 16384),
}
MORE_OPTIONS = ({}, {"lora_rank": 16}, {"kl_coef": 0.1}, {"minibatches": 4})


def random_case(seed):
    rng = random.Random(seed)
    pools = [
        pool(f"kind{kind}", count, gpus, **drawn(rng, SHEET))
        for kind, (count, gpus) in enumerate(rng.choice(SMALL_CLUSTERS))
    ]
    options = drawn(rng, OPTIONS) | rng.choice(MORE_OPTIONS)
    size = rng.choice(["0.6b", "0.6b", "4b"])
    return job(size, **options), cluster(*pools, **drawn(rng, LINKS))


NAMED_CASES = {
    "three machines cannot share eight groups": (
        job(),
        cluster(
            pool("trains", 3, 1, tflops=5.0), pool("samples", 1, 4, tflops=2.0), across_kinds=50.0
        ),
    ),
    "one GPU is too small": (job("4b"), cluster(pool(gpus=1, memory_gib=16.0))),
    "a slow link inside a machine": (job(), cluster(pool(gb_per_s=0.5))),
    "most GPUs would only wait": (
        job(async_ratio=4.0),
        cluster(
            pool("trains", 1, 1, tflops=20.0), pool("samples", 1, 8, tflops=2.0), across_kinds=50.0
        ),
    ),
}


@pytest.mark.parametrize(
    "case",
    [*range(4), *NAMED_CASES, *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 40))],
)
def test_plans_are_the_best_of_all_and_can_be_run(case):
    """The cheaper plan may have a step that is longer than the fastest by a random factor."""
    j, c = NAMED_CASES[case] if case in NAMED_CASES else random_case(case)
    every = [*outcomes(j, c)]
    if not every:
        arithmetic = (
            r"fits on no GPUs .*; one of \d+ trainer ranks needs .* = .* a tp \d engine needs"
        )
        with pytest.raises(ValueError, match=arithmetic):
            plan(j, c)
        return

    def cheapest(limit_s):
        return min(price for step_s, price in every if step_s <= limit_s)

    fastest = min(step_s for step_s, _ in every)
    plans = plan(j, c)
    assert fastest * (1 - 1e-6) <= plans[0].step_s <= fastest * 1.001
    assert plans[0].cost_per_hour <= cheapest(plans[0].step_s * (1 + 1e-6)) * 1.001 + 0.01
    assert [p.step_s for p in plans[1:]] == sorted(p.step_s for p in plans)[1:]
    assert len({p.split.trainer for p in plans}) == len(plans) <= 4
    limit_s = fastest * random.Random(case).uniform(1.01, 4)
    thrifty = plan(j, c, j.tokens / limit_s)[0]
    assert thrifty.step_s <= limit_s * (1 + 1e-6)
    assert (
        cheapest(limit_s) * (1 - 1e-6) <= thrifty.cost_per_hour <= cheapest(limit_s) * 1.001 + 0.01
    )
    for p in (plans[0], plans[-1], thrifty):
        longest_s = max(e.decode_s for _, e, _ in p.engines) * LONGEST
        busy_s = p.generation_s + p.update_s
        most_s = most_seconds(busy_s, p.split.training_s, longest_s, p.split.alpha)
        assert p.step_s <= p.most_step_s == pytest.approx(most_s)
        check_plan(p, c)
    with pytest.raises(ValueError, match=r"^no plan has .* tokens/s; the fastest has [\d.]+$"):
        plan(j, c, 1.01 * j.tokens / fastest)


# Costs, by the formulas of the planner's page


def read_tokens(j):
    """Tokens that the trainer reads in a pass: 32 responses, and their prompts, or one of each group of 4."""
    return 100 * (32 if j.config.share_prefix == "off" else 8) + 32 * 500


def num_scored(j):
    """Passes without gradient: by a reference, and before the first minibatch."""
    return (j.config.kl_coef > 0) + (j.config.minibatches > 1)


def seconds_of_passes(j, t):
    """2 FLOPs for each weight and token that a pass reads, and attention; embeddings are looked up."""
    config, model, read = j.config, j.shape, read_tokens(j)
    squares = 32 * (300**2 + 500**2 + 1000**2) / 3
    used = model.num_layers * (
        model.layer_parameters * read + model.num_attention_heads * 128 * squares
    )
    used += model.vocab_size * model.hidden_size * 32 * 500
    backward = 1 if config.lora_rank else 2
    passes = 1 + backward + num_scored(j) + ("activations" in t.save_memory)
    is_short = min(t.microbatch, read / t.ranks / config.minibatches) < 8192
    flops_per_s = t.pool.tflops * 1e12 * t.pool.mfu * (0.875 if is_short else 1)
    return passes * 2 * used / (t.ranks * flops_per_s)


def ring_s(num_bytes, num_gpus, gb_per_s):
    """Seconds in which a ring of GPUs gathers or reduces: each passes on all but its own part."""
    return num_bytes * (1 - 1 / num_gpus) / (gb_per_s * 1e9)


def seconds_of_training(j, c, t):
    """t: passes, or exchanges or launches of layers if they take longer; exchanges of embedding and head, once an
    update or in each micro-batch; one among replicas an update; AdamW; and the gathering to publish."""
    config, model = j.config, j.shape
    root, trained = model.root_parameters, memory.trained_parameters(config, model)
    link = t.pool.gb_per_s
    byte_s = ring_s(1, t.shards, link if t.shards <= t.gpus else min(link, c.same_kind))
    reduced = 0 if config.lora_rank else root
    gather_s = 2 * (model.num_parameters - root) * byte_s
    reduce_s = 4 * (trained - reduced) * byte_s
    budget = t.ranks * t.microbatch
    count = config.minibatches * math.ceil(read_tokens(j) / config.minibatches / budget)
    references = count * (config.kl_coef > 0 and config.lora_rank == 0)
    gathers = config.minibatches + references
    if "layers" in t.save_memory:
        gathers = count * (2 + num_scored(j))
    layers_s = gathers * gather_s + count * reduce_s
    root_s = (2 * root + 4 * reduced) * byte_s
    if "head" in t.save_memory:
        root_s = count * (root_s + num_scored(j) * 2 * root * byte_s)
    else:
        root_s *= config.minibatches
        root_s += references * 2 * root * byte_s
    hbm = t.pool.hbm_gb_per_s * 1e9 * t.pool.hbm_efficiency
    adamw_s = config.minibatches * 28 * trained / t.shards / hbm
    if "optimizer" in t.save_memory:
        host = 12 * count * model.num_parameters + config.minibatches * 28 * trained
        adamw_s = host / t.shards / 16e9
    publish_s = 2 * model.num_parameters * byte_s
    passes = 3 + num_scored(j) + ("activations" in t.save_memory)
    host_s = 0.0065 * count * model.num_layers * passes / 3
    # the rings through each shard of all replicas share a machine's link, and sum gradients once an update
    if t.machines > 1:
        link = min(link, c.same_kind / min(t.gpus, t.shards))
    replicas_s = config.minibatches * ring_s(2 * 4 * trained / t.shards, t.ranks / t.shards, link)
    once_s = root_s + replicas_s + adamw_s + publish_s
    return max(seconds_of_passes(j, t), layers_s, host_s) + once_s


CONTEXT = 100 + (200**2 + 400**2 + 900**2) / (200 + 400 + 900) / 2
"""Mean tokens of a request that runs."""


def seconds_of_decoding(j, p, tp, b):
    """d and p: of a step of b requests, and of a prompt's prefill."""
    model, link = j.shape, tp * p.gb_per_s * 1e9
    weights, flops = 2 * model.num_parameters, tp * p.tflops * 1e12 * p.mfu
    hbm = p.hbm_gb_per_s * 1e9 * p.hbm_efficiency
    kv = 2 * 2 * model.num_layers * math.ceil(8 / tp) * 128

    def exchange_s(tokens):
        return 4 * model.num_layers * (tp - 1) * (10e-6 + tokens * model.hidden_size * 2 / link)

    products_s = weights * b / (tp * p.tflops * 1e12 * 0.6)
    layers_s = max(weights / tp / hbm, products_s) + b * kv * CONTEXT / hbm
    decode_s = p.host_s + layers_s + exchange_s(b)
    return decode_s, weights * 100 / flops + exchange_s(100)


@pytest.mark.parametrize("seed", range(40))
def test_training_and_sampling_take_what_their_formulas_say(seed):
    """An engine has as many requests as there are, as it may have, and as its cache holds."""
    j, c = random_case(seed)
    for p in c.pools:
        for machines, gpus in itertools.product(range(1, p.count + 1), range(1, p.gpus + 1)):
            for t in trainings(j, p, machines, gpus, False):
                assert 0 in (t.shards % gpus, gpus % t.shards), (
                    "machines have equal parts of a replica"
                )
                assert training_s(j, c, t) == pytest.approx(seconds_of_training(j, c, t))
        for tp in (1, 2, 4, 8):
            engine = largest_engine(j, p, tp)
            room = 0.9 * p.memory_gib * memory.GIB
            beside = memory.total(memory.engine_items(j.config, j.shape, tp))
            kv_bytes = memory.kv_bytes_per_token(j.shape, tp)
            least = beside + (128 + 900) * kv_bytes
            assert largest_engine(j, p, tp, least) and not largest_engine(j, p, tp, least - 1)
            cache = (room - beside) / kv_bytes
            assert (engine is None) == (room < least)
            if engine is None:
                continue
            outstanding = math.floor(32 * max(1, j.config.async_ratio))
            requests = min(j.config.max_running_requests, outstanding, int(cache / CONTEXT))
            decode_s, prompt_s = seconds_of_decoding(j, p, tp, requests)
            assert engine.requests == requests and engine.decode_s == pytest.approx(decode_s)
            rate = requests * 500 / (500 * decode_s + requests * prompt_s)
            assert engine.rate == pytest.approx(rate)


# What brute force does not see


def test_without_prices_the_fewest_gpus_are_the_cheapest():
    c = cluster(pool(count=4, gpus=4, price_per_hour=0.0))
    wanted = job().tokens / plan(job(), c)[0].step_s / 1.5
    best = plan(job(), c, wanted)[0]
    assert best.cost_per_hour == 0.0
    assert best.split.training.ranks + sum(gpus for _, gpus in best.sampling_gpus) <= 6


@pytest.mark.parametrize(("tp", "sampled"), [(1, 20.0), (1, 2300.0), (2, 567.0)])
def test_a_pool_has_the_rates_that_were_measured_of_it(tp, sampled):
    """Whether products hide the reading of weights, or are hidden by it."""
    measured = pool(gpus=8, trained_tokens_per_s=1234.0, sampled_tokens_per_s=sampled)
    j = job(rollout_tp=tp)
    calibrated = planner.calibrated(j, measured)
    assert largest_engine(j, calibrated, tp).rate == pytest.approx(tp * sampled)
    training = planner.Training(calibrated, 1, 8, 8, j.config.save_memory, 32768, False)
    assert j.tokens / planner.compute_s(j, training) / 8 == pytest.approx(1234.0)
