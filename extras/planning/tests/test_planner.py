"""The planner: its costs by hand, and its choice against brute force on small random clusters."""

import dataclasses
import itertools
import math
import random
from collections import Counter

import pytest

from asyncrl.config import Config
from extras.planning import memory, planner
from extras.planning.planner import (
    Cluster,
    Job,
    Lengths,
    Pool,
    Training,
    largest_engine,
    make_engine,
    plan,
    training_s,
    trainings,
)
from extras.planning.shape import ModelShape

LENGTHS = Lengths.of(100, [200, 400, 900], 32)
CONFIG = Config(
    max_prompt_tokens=128,
    max_response_tokens=900,
    groups_per_step=8,
    group_size=4,
    max_running_requests=8,
    max_tokens_per_microbatch=4112,
)


def shape(layers=28, hidden=1024, wide=3072, heads=16, vocab=151936) -> ModelShape:
    """The 0.6b of Qwen3, if nothing else is said."""
    layer, root = hidden * 128 * (2 * heads + 16) + 3 * hidden * wide, vocab * hidden
    return ModelShape(
        layers * layer + root, layer, root, root, layers, hidden, wide, heads, 8, 128, vocab
    )


SMALL, LARGE = shape(), shape(36, 2560, 9728, 32)


def pool(name="fast", count=1, gpus=2, **changes) -> Pool:
    pool = Pool(name, name, count, gpus, 2.0, 100.0, 1000.0, 80.0, 100.0)
    return dataclasses.replace(pool, **changes)


def job(model=SMALL, **options) -> Job:
    return Job(dataclasses.replace(CONFIG, **options), model, LENGTHS)


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


def seconds_of_step(j, busy_s, train_s, kinds, alpha=None):
    """`kinds` are the pools and tps of the engines; the fastest ends the longest response, alone."""
    alpha = j.config.async_ratio if alpha is None else alpha
    alone_s = min(make_engine(j, *kind, 1).decode_s for kind in kinds)
    held_s = busy_s + train_s + (j.lengths.longest - 500) * alone_s
    return max(busy_s, train_s, held_s / (1 + alpha))


def outcomes(j, c):
    """(seconds of a step, price per hour) of every plan there is, but for GPUs that both sides share."""
    tps = [tp for tp in (1, 2, 4, 8) if memory.can_split(j.shape, tp)]
    weights = 2 * j.shape.num_parameters / 1e9
    for p in c.pools:
        for machines, gpus, stages in itertools.product(
            range(1, p.count + 1), range(1, p.gpus + 1), (False, True)
        ):
            if j.config.groups_per_step % machines or (stages and gpus == p.gpus):
                continue
            times_s = [training_s(j, c, t) for t in trainings(j, p, machines, gpus, stages)]
            if not times_s:
                continue
            train_s = min(times_s)
            others = [(q, q.count - machines * (q is p)) for q in c.pools]
            others = [(q, count) for q, count in others if count]
            for num in range(len(others) + 1):
                for chosen in itertools.combinations(others, num):
                    update_s = weights / p.gb_per_s if stages else 0.0
                    for q, _ in chosen:
                        link = c.same_kind if q.gpu == p.gpu else c.across_kinds
                        update_s = max(update_s, 5 * weights / link)
                    here = [
                        ((p, tp), machines * n)
                        for tp in tps
                        for n in range(1, (p.gpus - gpus) // tp * stages + 1)
                    ]
                    there = [
                        [((q, tp), n) for tp in tps for n in range(1, count * (q.gpus // tp) + 1)]
                        for q, count in chosen
                    ]
                    for sampling in itertools.product(
                        [None, *here], *([None, *numbers] for numbers in there)
                    ):
                        engines = Counter()
                        for kind, count in filter(None, sampling):
                            engines[kind] += count
                        rate = 0 < engines.total() <= j.requests and rate_of(j, engines)
                        if not rate:
                            continue
                        busy_s = j.tokens / rate + update_s
                        step_s = seconds_of_step(j, busy_s, train_s, engines)
                        used = sum(q.price_per_hour * tp * n for (q, tp), n in engines.items())
                        yield step_s, used + machines * gpus * p.price_per_hour


def shared_outcomes(j, c):
    """Of one GPU that both sides share, as the planner has them."""
    for p in c.pools:
        for split in planner._shared(j, c, p):
            busy_s = j.tokens / split.options[0][1].rate + split.update_s
            step_s = seconds_of_step(j, busy_s, split.training_s, [(p, 1)], alpha=0.0)
            yield step_s, p.price_per_hour


def random_case(seed):
    rng = random.Random(seed)
    kinds, left, pools = rng.randint(1, 3), rng.randint(1, 8), []
    for kind in range(kinds):
        gpus = rng.choice([n for n in (1, 2, 3, 4, 8) if n <= max(1, left)])
        count = rng.randint(1, max(1, min(3, left // gpus)))
        if gpus * count > left:
            break
        left -= gpus * count
        sheet = {
            "price_per_hour": rng.choice([0.0, 0.5, 1.0, 2.0, 5.0]),
            "tflops": rng.uniform(60, 1000),
            "hbm_gb_per_s": rng.uniform(300, 5000),
            "memory_gib": rng.choice([16.0, 24.0, 48.0, 80.0]),
            "gb_per_s": rng.choice([32.0, 200.0, 450.0]),
        }
        pools.append(pool(f"kind{kind}", count, gpus, **sheet))
    c = cluster(
        *pools, same_kind=rng.choice([1.25, 5.0, 50.0]), across_kinds=rng.choice([0.1, 1.25, 10.0])
    )
    options = {
        "async_ratio": rng.choice([0.0, 0.5, 1.0, 2.0]),
        "max_running_requests": rng.choice([2, 4, 8]),
    }
    return job(rng.choice([SMALL, SMALL, LARGE]), **options), c


def check_against_brute_force(seed):
    j, c = random_case(seed)
    every = [*outcomes(j, c), *shared_outcomes(j, c)]
    if not every:
        with pytest.raises(ValueError, match="fits on no GPUs"):
            plan(j, c)
        return "nothing fits"
    fastest = min(step for step, _ in every)
    best = plan(j, c)[0]
    assert fastest * (1 - 1e-6) <= best.step_s <= fastest * 1.001
    assert best.step_s <= best.most_step_s
    limit_s = fastest * random.Random(seed).uniform(1.01, 4)
    cheapest = min(cost for step, cost in every if step <= limit_s)
    thrifty = plan(j, c, j.tokens / limit_s)[0]
    assert thrifty.step_s <= limit_s * (1 + 1e-6)
    assert cheapest * (1 - 1e-6) <= thrifty.cost_per_hour <= cheapest * 1.001 + 0.01
    return "fits"


@pytest.mark.parametrize(
    "seeds",
    [
        range(10),
        pytest.param(range(10, 60), marks=pytest.mark.slow),
        pytest.param(range(100, 600), marks=pytest.mark.study),
    ],
)
def test_plans_are_the_best_of_all_on_small_random_clusters(seeds):
    results = [check_against_brute_force(seed) for seed in seeds]
    assert results.count("fits") >= len(seeds) / 2


# Costs, by hand


def test_a_step_on_one_gpu_takes_its_flops_and_adamw():
    j, p = job(), pool(tflops=100.0, mfu=0.5, hbm_gb_per_s=1000.0, hbm_efficiency=1.0)
    t = Training(p, 1, 1, 1, (), 4112, False)
    tokens, squares = 32 * (100 + 500), 32 * (300**2 + 500**2 + 1000**2) / 3
    in_layers = 28 * (SMALL.layer_parameters * tokens + 16 * 128 * squares)
    flops = 3 * 2 * (in_layers + 151936 * 1024 * 32 * 500)
    adamw_s = 28 * SMALL.num_parameters / 1e12
    assert training_s(j, cluster(p), t) == pytest.approx(flops / 50e12 + adamw_s)
    kept_less = dataclasses.replace(t, save_memory=("activations",))
    assert training_s(j, cluster(p), kept_less) == pytest.approx(4 / 3 * flops / 50e12 + adamw_s)


def test_over_a_slow_network_each_micro_batch_gathers_twice_and_reduces_once():
    j, p = job(max_tokens_per_microbatch=1028), pool(count=2, gpus=1, tflops=1e6, hbm_gb_per_s=1e9)
    weights, microbatches = SMALL.num_parameters, math.ceil(32 * 600 / 2 / 1028)
    sharded = Training(p, 2, 1, 2, (), 1028, False)
    per_pass, publication = (2 * 2 + 4) * weights / 2, 2 * weights / 2
    expected = (microbatches * per_pass + publication) / 5e9
    assert training_s(j, cluster(p), sharded) == pytest.approx(expected, rel=1e-3)
    replicas = dataclasses.replace(sharded, shards=1)
    expected = microbatches * 2 * 4 * weights / 2 / 5e9
    assert training_s(j, cluster(p), replicas) == pytest.approx(expected, rel=1e-3)


def test_replicas_on_two_machines_share_their_network_link_and_keep_gathers_at_home():
    j, p = job(), pool(count=2, gpus=4, tflops=1e6, hbm_gb_per_s=1e9, gb_per_s=1e6)
    t = Training(p, 2, 4, 4, (), 4112, False)
    microbatches = math.ceil(32 * 600 / 8 / 4112)
    # four ranks of a machine, a quarter each, over one link
    reduced = 2 * 4 * (4 * SMALL.num_parameters / 4) * (1 / 2)
    assert training_s(j, cluster(p), t) == pytest.approx(microbatches * reduced / 5e9, rel=1e-2)


def test_an_engine_reads_weights_and_cache_computes_and_waits_for_the_host():
    j, p = job(), pool(tflops=100.0, mfu=0.5, hbm_gb_per_s=1000.0, hbm_efficiency=0.5)
    weights, context = SMALL.num_parameters, 100 + (200**2 + 400**2 + 900**2) / 3 / (2 * 500)
    kv = 4 * 28 * 8 * 128
    decode_s = 0.003 + (2 * weights + 8 * context * kv) / 500e9 + 8 * 2 * weights / 50e12
    engine = make_engine(j, p, 1, 8)
    assert engine.decode_s == pytest.approx(decode_s)
    assert engine.rate == pytest.approx(8 * 500 / (500 * decode_s + 8 * 2 * weights * 100 / 50e12))


def test_two_gpus_of_an_engine_halve_its_reading_and_pay_four_exchanges_a_layer():
    j, p = (
        job(),
        pool(tflops=100.0, mfu=0.5, hbm_gb_per_s=1000.0, hbm_efficiency=0.5, gb_per_s=100.0),
    )
    alone, both = make_engine(j, p, 1, 8), make_engine(j, p, 2, 8)
    exchanges_s = 4 * 28 * (10e-6 + 8 * 1024 * 2 / (2 * 100e9))
    assert both.decode_s - 0.003 - exchanges_s == pytest.approx((alone.decode_s - 0.003) / 2)


def test_the_cache_and_the_options_limit_how_many_requests_an_engine_has():
    def requests(p, **options):
        engine = largest_engine(job(**options), p, 1)
        return engine and engine.requests

    assert requests(pool()) == 8
    assert requests(pool(), max_running_requests=3) == 3
    assert requests(pool(), max_running_requests=256) == 32, "no more are there at α = 1"
    assert requests(pool(), max_running_requests=256, async_ratio=2) == 64
    assert requests(pool(memory_gib=6.0)) == 3
    assert requests(pool(memory_gib=5.8)) is None


# What is chosen


def test_gpus_that_would_only_wait_stay_idle():
    trains, samples = pool("trains", 1, 1, tflops=20.0), pool("samples", 1, 8, tflops=2.0)
    best = plan(job(async_ratio=4.0), cluster(trains, samples, across_kinds=50.0))[0]
    assert best.split.training.pool == trains and best.split.training_s == pytest.approx(
        best.step_s, rel=1e-3
    )
    assert 2 <= sum(gpus for _, gpus in best.sampling_gpus) <= 6, "of 8"
    all_of_them = planner.solve(best.split)
    assert all_of_them.step_s == pytest.approx(best.step_s, rel=1e-3)
    assert all_of_them.cost_per_hour > best.cost_per_hour


def test_each_kind_has_engines_of_as_many_gpus_as_suit_it():
    small, large = pool("small", 1, 8, memory_gib=13.0), pool("large", 4, 1)
    c = cluster(pool("trains", 1, 1, tflops=1e5, memory_gib=300.0), small, large, across_kinds=50.0)
    best = plan(job(LARGE, max_running_requests=256, async_ratio=8.0), c)[0]
    tps = {engine.pool.name: engine.tp for _, engine, _ in best.engines}
    assert tps == {"small": 2, "large": 1}


@pytest.mark.parametrize(
    ("trains", "requests", "count"),
    [
        (False, 100, 2),  # on 6 GPUs, and not 3
        (True, 100, 2),
        (False, 1, 1),
        (True, 1, None),  # as both machines have the same engines
    ],
)
def test_engines_of_two_gpus_leave_the_third_of_each_machine_idle(trains, requests, count):
    threes = pool("threes", 2, 3)
    option = planner.Site(threes, 2, 3, trains), make_engine(job(), threes, 2, 1)
    assert planner.choose_engines([option], requests) == (count and [(*option, count)])


def test_no_rate_is_enough_where_training_alone_takes_longer():
    best = plan(job(async_ratio=4.0), cluster(pool()))[0]
    split = best.split
    assert split.least_rate(split.training_s * 0.99, best.tail_s) == math.inf
    assert split.least_rate(split.update_s, best.tail_s) == math.inf


def test_one_gpu_trains_and_samples_in_turns():
    (best,) = plan(job(), cluster(pool(count=1, gpus=1)))
    assert best.split.colocate == "share" and best.cost_per_hour == 2.0
    split = best.split
    assert best.step_s == pytest.approx(
        best.generation_s + best.tail_s + split.update_s + split.training_s
    )
    synchronous = plan(job(async_ratio=0.0), cluster(pool(count=1, gpus=1, memory_gib=20.0)))[0]
    assert synchronous.split.colocate == "sleep", "where both do not fit at the same time"


def test_without_prices_the_fewest_gpus_are_the_cheapest():
    c = cluster(pool(count=4, gpus=4, price_per_hour=0.0))
    wanted = job().tokens / plan(job(), c)[0].step_s / 8
    best = plan(job(), c, wanted)[0]
    assert best.cost_per_hour == 0.0
    assert best.split.training.ranks + sum(gpus for _, gpus in best.sampling_gpus) <= 4


def test_the_next_best_plans_train_on_other_gpus_and_are_in_order():
    plans = plan(job(), cluster(pool("a", 2, 4), pool("b", 2, 4, tflops=300.0)))
    assert len(plans) == 4
    assert len({p.split.trainer for p in plans}) == 4
    assert [p.step_s for p in plans] == sorted(p.step_s for p in plans)


def test_a_model_that_fits_nowhere_is_refused_with_the_arithmetic():
    with pytest.raises(
        ValueError,
        match=r"fast has 15.4 GiB; one of 2 trainer ranks needs .* = .* a tp 2 engine needs",
    ):
        plan(job(shape(64, 5120, 25600, 64)), cluster(pool(memory_gib=16.0)))


def test_a_rate_that_no_plan_reaches_is_refused_with_the_best():
    fastest = job().tokens / plan(job(), cluster(pool()))[0].step_s
    with pytest.raises(ValueError, match=f"no plan has .* tokens/s; the fastest has {fastest:g}"):
        plan(job(), cluster(pool()), 2 * fastest)


def test_lengths_are_means_of_what_was_given():
    lengths = Lengths.of(10, [3, 1], 2)
    assert (lengths.prompt, lengths.response, lengths.longest) == (10, 2, 2.5), (
        "of two one is 3 in three cases of four"
    )
    assert lengths.square == (11**2 + 13**2) / 2
    assert lengths.context == 10 + (1 + 9) / 2 / (2 * 2)
