"""The planner's command: what it reads, refuses and prints; its arithmetic is
extras/planning/tests/test_planner.py's."""

import dataclasses
import json
import random
import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from qwen3_models import folder_of, shape_of
from test_planner import cluster, job, pool
from written_run import write_run

from asyncrl.cluster.cluster import check_shares
from asyncrl.cluster.placement import place
from asyncrl.config import Config
from asyncrl.job.command_line import parse_config
from extras.planning import memory, planner
from extras.planning.advice import config_of
from extras.planning.fit import plan_memory
from extras.planning.plan import commands
from extras.planning.plan_inputs import (
    lengths_of,
    make_cluster,
    read_cluster,
    read_lengths,
    with_rates,
)
from extras.planning.planner import Job, Training, compute_s, make_engine
from extras.planning.shape import read_shape
from scripts.plan import main

LINKS = "[links]\nsame_kind = 5\nacross_kinds = 1.5\n"
MACHINES = f"""\
[[machines]]
gpu = "H800"
gpus = 4
price_per_hour = 5.0
[[machines]]
gpu = "H20"
gpus = 8
count = 2
{LINKS}"""
JOINING = """\
[[machines]]
gpu = "H800"
gpus = 1
price_per_hour = 2
[[machines]]
gpu = "H20"
gpus = 8
count = 2
price_per_hour = 1
mfu = 0.1
[links]
across_kinds = 50
"""
"""One H800 trains, H20 that compute badly join."""
EXAMPLES = Path(planner.__file__).parent / "clusters"
CLUSTERS = {path.stem: path.read_text() for path in sorted(EXAMPLES.glob("*.toml"))}
CLUSTERS["idle GPUs"] = JOINING
LENGTHS = Config().max_prompt_tokens, 2048
"""The former is the default, which the model would change."""
JOB = (
    "--groups-per-step",
    16,
    "--max-prompt-tokens",
    LENGTHS[0],
    "--max-response-tokens",
    LENGTHS[1],
)
GIVEN = ("--model", folder_of("1.7b"), *JOB)


@pytest.fixture
def write(tmp_path):
    """Writes a cluster file, and returns its path."""

    def write(text):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return path

    return write


def planned(capsys, *args):
    main([*map(str, args), "--json"])
    return json.loads(capsys.readouterr().out)


def refusal(*args):
    with pytest.raises(SystemExit) as caught:
        main([*map(str, args)])
    assert "\n" not in caught.value.code
    return caught.value.code


def number_after(option, command, default):
    match = re.search(rf"{option} (\d+)", command)
    return int(match[1]) if match else default


def check_that_it_fits(command, cluster, pool, config, plan):
    """What a node of the run, or a machine that joins it, checks before it starts; no step of it may be doubtful.

    Returns how many GPUs it has.
    """
    visible = re.match(r"CUDA_VISIBLE_DEVICES=(\S+)", command)
    num_gpus = len(visible[1].split(",")) if visible else pool.gpus
    shape = read_shape(config.model)
    if "--join" in command:
        tp = number_after("--rollout-tp", command, config.rollout_tp)
        own = {"num_rollout_workers": None, "weight_sync": "auto", "rollout_tp": tp}
        config = dataclasses.replace(config, **own)
        workers = place(config, num_gpus, 64, 0).workers
        assert sum(worker.num_gpus for worker in workers) == num_gpus
        memory.check_engine(config, shape, pool.device)
        return num_gpus
    ranks = sum(plan["train"].values())
    nodes = number_after("--nnodes", command, 1)
    ranks_here = number_after("--nproc-per-node", command, None)
    assert nodes * ranks_here == ranks
    check_shares(config, nodes, ranks)
    placement = place(config, num_gpus, 64, ranks_here)
    sharing = memory.Sharing(ranks, ranks // config.replicas)
    gpus = [pool.device] * num_gpus
    placement, arithmetic = plan_memory(config, placement, shape, gpus, sharing)
    assert "warning" not in arithmetic
    if config.listen is None:
        job = Job(config, shape, read_lengths(None, config, None))
        nodes_of_run = dataclasses.replace(pool, count=nodes, gpus=num_gpus)
        alone = dataclasses.replace(cluster, pools=(nodes_of_run,))
        predicted = planner.of_placement(job, alone, placement)
        assert predicted.split.training_s == pytest.approx(plan["training_s"])
        assert predicted.generation_s == pytest.approx(plan["generation_s"])
        times = predicted.split.update_s / plan["update_s"]
        assert 1 - 1e-6 <= times <= len(placement.workers) + 1e-6
    num_workers = 1 if config.num_rollout_workers is None else config.num_rollout_workers
    assert len(placement.workers) == num_workers
    is_shared = placement.transport == "ipc"
    return ranks_here + num_workers * config.rollout_tp * (not is_shared)


def check_plan(plan, cluster):
    """Whoever runs its commands accepts them, they use the GPUs that are planned and no others, and its numbers fit.

    Returns the trainer's options.
    """
    trainer, *join_commands = (line["command"] for line in plan["commands"])
    words = shlex.split(trainer)
    config = parse_config(words[words.index("train_async.py") + 1 :])
    assert config == config.checked() and bool(join_commands) == (config.listen is not None)
    assert all("rollout.py --join HOST0:" in command for command in join_commands)
    used = Counter()
    for line in plan["commands"]:
        (pool,) = (p for p in cluster.pools if line["machines"].endswith(f"× {p.name}"))
        num_gpus = check_that_it_fits(line["command"], cluster, pool, config, plan)
        used[pool.gpu] += int(line["machines"].split()[0]) * num_gpus
    assert used == Counter(plan["train"]) + Counter(plan["rollout"])
    busy_s = plan["generation_s"] + plan["update_s"]
    least_s = max(plan["training_s"], busy_s) * (1 - 1e-9)
    assert least_s <= plan["step_s"] <= plan["most_step_s"]
    per_s = plan["cost_per_hour"] / 3600
    assert plan["cost_per_step"] == pytest.approx(per_s * plan["step_s"])
    assert plan["cost_per_million_tokens"] == pytest.approx(per_s / plan["tokens_per_s"] * 1e6)
    has_shared = plan["transport"] == "ipc"
    assert has_shared == (not plan["rollout"])
    assert (config.colocate == "sleep") == (has_shared and config.async_ratio == 0)
    assert ("pull" in plan["transport"]) == (config.listen is not None)
    assert plan["max_staleness"] == config.max_staleness
    return config


def random_cluster(rng):
    names = ["H200", "H20", "A100 40GB", "L40S", "RTX 4090", "H800"]
    kinds = rng.sample(names, rng.choice([1, 2, 3]))
    text = "".join(
        f'[[machines]]\ngpu = "{gpu}"\ncount = {rng.choice([1, 1, 2, 3])}\n'
        f"gpus = {rng.choice([1, 2, 4, 8])}\nprice_per_hour = 2\n"
        for gpu in kinds
    )
    return text + LINKS


@pytest.mark.parametrize(
    "case", [*range(6), *CLUSTERS, *(pytest.param(i, marks=pytest.mark.slow) for i in range(6, 24))]
)
def test_whatever_is_planned_fits_by_the_arithmetic_of_those_who_run_it(case, write, capsys):
    """The fastest plan, and slower ones for which GPUs stay idle or do both; our examples, and random clusters."""
    rng = random.Random(case)
    path = write(CLUSTERS[case] if case in CLUSTERS else random_cluster(rng))
    alpha, size = rng.choice([0, 0.5, 1, 4]), rng.choice(["0.6b", "1.7b", "8b"])
    sleeps = ("--colocate", "sleep") if alpha == 0 else ()
    given = (path, "--model", folder_of(size), *JOB, "--async-ratio", alpha, *sleeps)
    try:
        plan = planned(capsys, *given)
    except SystemExit as refused:
        assert case not in CLUSTERS
        assert "fits on no GPUs" in refused.code or "does not go with" in refused.code
        return
    plans = [plan]
    for share in (0.85, 0.05):
        wanted = share * plan["tokens_per_s"]
        plans.append(planned(capsys, *given, "--tokens-per-s", wanted))
        assert plans[-1]["tokens_per_s"] >= wanted * (1 - 1e-6)
    prices = [plan["cost_per_hour"] for plan in plans]
    assert prices == sorted(prices, reverse=True)
    for plan in plans:
        config = check_plan(plan, read_cluster(path)[0])
        assert (config.model, config.groups_per_step) == (folder_of(size), 16)
        assert (config.max_prompt_tokens, config.max_response_tokens) == LENGTHS
    assert case != "idle GPUs" or plans[1]["rollout"]["H20"] % 8 > 0


def test_engines_of_another_size_join_with_a_number_of_gpus_of_their_own():
    c = cluster(pool("near", 1, 4), pool("far", 1, 4))
    split = next(s for s in planner.splits(job(), c) if len({site for site, _ in s.options}) == 2)
    sizes = {(True, 2), (False, 4)}
    engines = [(site, e, 1) for site, e in split.options if (site.trains, e.tp) in sizes]
    trainer, join = commands(planner.sampled_by(split, engines[::-1]))
    assert " --rollout-tp 2 " in trainer["command"] and " --rollout-tp 4" in join["command"]


def test_people_get_the_commands_and_the_next_best_plans(write, capsys):
    given = (write(JOINING), *GIVEN, "--lengths", "lognormal:500,0.7")
    plan = planned(capsys, *given)
    main([*map(str, given)])
    text = capsys.readouterr().out
    note = "note: [links] same_kind is missing; 1.25 GB/s assumed, Ethernet of 10 Gbit/s\n"
    assert text.startswith(note)
    shown = [line["command"] for line in plan["commands"]] + plan["next"]
    assert all(f"{line}\n" in text for line in shown)
    assert "runs/plan/swarm.key (extras/swarm/README.md)" in text


def test_data_sheets_may_be_overridden_and_two_lists_of_a_kind_are_told_apart(write):
    text = '[[machines]]\ngpu = "L4"\ngpus = 2\nmfu = 0.3\ngb_per_s = 10\n[[machines]]\ngpu = "L4"\ngpus = 1\n'
    cluster, notes = read_cluster(write(text))
    first, second = cluster.pools
    assert (first.name, second.name, second.gpu) == ("L4", "L4 (2)", "L4")
    assert (first.mfu, first.gb_per_s, second.mfu, second.gb_per_s) == (0.3, 10, 0.4, 32)
    assert (cluster.same_kind, cluster.across_kinds, len(notes)) == (1.25, 1.25, 2)


@pytest.mark.parametrize(
    ("text", "options", "line"),
    [
        ("[[machines", GIVEN, "cannot be read"),
        (MACHINES, (), "--model is missing"),
        (MACHINES, (*GIVEN, "--tokens-per-s", -1), "--tokens-per-s must be above 0, got -1.0"),
        (MACHINES, (*GIVEN, "--prompt-tokens", 513), "is above --max-prompt-tokens"),
        (MACHINES, (*GIVEN, "--workload", "nowhere"), "does not exist"),
        (JOINING, (*GIVEN, "--scheduling", "batch"), "--listen"),
        (
            MACHINES.replace("gpus = 4", "gpus = 4\nsampled_tokens_per_s = 1e9"),
            GIVEN,
            "H800 is said to sample 1e+09 tokens/s per GPU; with 128 requests",
        ),
    ],
)
def test_mistakes_are_one_line(write, text, options, line):
    assert line in refusal(write(text), *options)


# A run as a workload


def test_the_lengths_of_a_run_are_those_of_its_prompts_and_responses(tmp_path):
    run, config = write_run(tmp_path), Config(max_prompt_tokens=500, max_response_tokens=2048)
    lengths = lengths_of(run, config, None)
    assert (lengths.prompt, lengths.response, lengths.longest) == (100, 50, pytest.approx(50))
    assert lengths_of(run, Config(max_response_tokens=40), 20.0).longest == pytest.approx(40)
    for sharing in (True, "prompt", "tree"):  # where prefixes were read once, nothing says how long
        run.info["config"]["share_prefix"] = sharing
        assert lengths_of(run, config, None).prompt == 500


def test_a_runs_rates_are_those_of_the_planner_for_the_same_gpu_and_job(tmp_path, write):
    """It trained 200 tokens in 0.3 s, and sampled 100 in 0.6 s of a step, 0.65 of responses."""
    run = write_run(tmp_path)
    run.info["hardware"]["gpus"] = ["NVIDIA H100 80GB HBM3"] * 2
    path = write('[[machines]]\ngpu = "H100 SXM"\ngpus = 2\n[[machines]]\ngpu = "H20"\ngpus = 1\n')
    cluster, note = with_rates(read_cluster(path)[0], run)
    measured, other = cluster.pools
    assert (other.mfu, other.hbm_efficiency) == (0.4, 0.7) and "H100 SXM has mfu" in note
    config = config_of(run)
    job = Job(config, shape_of("1.7b"), lengths_of(run, config, None))
    assert compute_s(job, Training(measured, 1, 1, 1, (), 1, False)) == pytest.approx(0.3)
    assert make_engine(job, measured, 1, 0.65 / 0.6).rate == pytest.approx(100 / 0.6)
    run.info["config"]["listen"] = "0.0.0.0:29600"
    assert "ran on machines that joined it, too" in with_rates(cluster, run)[1]


def test_a_run_on_what_the_cluster_has_not_gives_its_lengths_alone(tmp_path, write, capsys):
    run = write_run(tmp_path)
    given = (write(MACHINES), *GIVEN, "--workload", run.path)
    (note,) = planned(capsys, *given)["notes"]
    assert "ran on a CPU: its lengths are taken" in note
    (run.path / "events.jsonl").write_text("")
    line = "has no response; give a run that has trained, or --lengths"
    assert line in refusal(*given)


def test_lognormal_lengths_are_cut_at_the_longest_allowed():
    lengths = read_lengths("lognormal:100,1", Config(max_response_tokens=5000), None)
    assert lengths.response == pytest.approx(100 * 2.718281828**0.5, rel=0.01)
    assert lengths.prompt == 40
    shorter = read_lengths("lognormal:100,1", Config(max_response_tokens=120), None)
    assert shorter.longest == pytest.approx(120)


def test_every_data_sheet_is_whole_and_has_a_source():
    sheets = tomllib.loads(planner.SHEETS.read_text())
    machines = [{"gpu": name, "gpus": 1} for name in sheets]
    make_cluster({"machines": machines}, Path("all.toml"))
    assert all(sheet["called"] and len(sheet["source"]) > 10 for sheet in sheets.values())
