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

from asyncrl.cluster.cluster import check_shares
from asyncrl.cluster.placement import place
from asyncrl.config import Config
from asyncrl.job.command_line import parse_config
from asyncrl.runlog.metrics import time_metrics
from asyncrl.runlog.run_directory import RunDirectory
from extras.planning import memory, planner
from extras.planning.fit import plan_memory
from extras.planning.plan import commands
from extras.planning.plan_inputs import lengths_of, read_cluster, read_lengths, with_rates
from extras.planning.planner import Job, Pool, Training, compute_s, make_engine
from scripts.plan import main
from scripts.runs import load

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


def trainer_config(command):
    """The options in the trainer's command, as train_async.py reads them."""
    words = shlex.split(command)
    return parse_config(words[words.index("train_async.py") + 1 :])


def number_after(option, command, default):
    match = re.search(rf"{option} (\d+)", command)
    return int(match[1]) if match else default


def check_that_it_fits(command, pool, config, shape, machines, ranks):
    """What a node of the run, or a machine that joins it, checks before it starts; no step of it may be doubtful.

    Returns how many GPUs it has.
    """
    visible = re.match(r"CUDA_VISIBLE_DEVICES=(\S+)", command)
    num_gpus = len(visible[1].split(",")) if visible else pool.gpus
    if "--join" in command:
        tp = number_after("--rollout-tp", command, config.rollout_tp)
        own = {"num_rollout_workers": None, "weight_sync": "auto", "rollout_tp": tp}
        config = dataclasses.replace(config, **own)
        workers = place(config, num_gpus, 64, 0).workers
        assert sum(worker.num_gpus for worker in workers) == num_gpus
        memory.check_engine(config, shape, pool.device)
        return num_gpus
    placement = place(config, num_gpus, 64, ranks // machines)
    sharing = memory.Sharing(ranks, ranks // config.replicas)
    gpus = [pool.device] * num_gpus
    placement, arithmetic = plan_memory(config, placement, shape, gpus, sharing)
    assert "warning" not in arithmetic
    assert ("engine" in arithmetic) == bool(placement.workers)
    assert ("staging" in arithmetic) == (placement.transport in ("ipc", "nccl"))
    num_workers = 1 if config.num_rollout_workers is None else config.num_rollout_workers
    assert len(placement.workers) == num_workers
    is_shared = placement.transport == "ipc"
    return ranks // machines + num_workers * config.rollout_tp * (not is_shared)


def check_commands(plan, pools, shape):
    """Whoever runs them accepts them, and they use the GPUs that are planned and no others."""
    trainer, *join_commands = (line["command"] for line in plan["commands"])
    config = trainer_config(trainer)
    nodes, ranks = number_after("--nnodes", trainer, 1), sum(plan["train"].values())
    assert nodes * number_after("--nproc-per-node", trainer, None) == ranks
    check_shares(config, nodes, ranks)
    assert config == config.checked() and bool(join_commands) == (config.listen is not None)
    assert all("rollout.py --join HOST0:" in command for command in join_commands)
    used = Counter()
    for line in plan["commands"]:
        (pool,) = (pool for pool in pools if line["machines"].endswith(f"× {pool.name}"))
        num_gpus = check_that_it_fits(line["command"], pool, config, shape, nodes, ranks)
        used[pool.gpu] += int(line["machines"].split()[0]) * num_gpus
    assert used == Counter(plan["train"]) + Counter(plan["rollout"])
    return config


def check_plan(plan, config):
    """Its numbers fit together."""
    assert len(plan["next"]) <= 3 and plan["planning_s"] > 0
    busy_s = plan["generation_s"] + plan["update_s"]
    least_s = max(plan["training_s"], busy_s) * (1 - 1e-9)
    assert least_s <= plan["step_s"] <= plan["most_step_s"]
    per_s = plan["cost_per_hour"] / 3600
    assert plan["cost_per_step"] == pytest.approx(per_s * plan["step_s"])
    assert plan["cost_per_million_tokens"] == pytest.approx(per_s / plan["tokens_per_s"] * 1e6)
    assert plan["tokens_per_s"] * plan["step_s"] > 16 * 8
    has_shared = plan["transport"] == "ipc"
    assert has_shared == (not plan["rollout"])
    assert (config.colocate == "sleep") == (has_shared and config.async_ratio == 0)
    assert ("pull" in plan["transport"]) == (config.listen is not None)
    assert plan["max_staleness"] == config.max_staleness


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
        config = check_commands(plan, read_cluster(path)[0].pools, shape_of(size))
        check_plan(plan, config)
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


def test_people_get_a_picture_the_next_best_plans_and_the_commands(write, capsys):
    given = (write(JOINING), *GIVEN, "--lengths", "lognormal:500,0.7")
    plan = planned(capsys, *given)
    main([*map(str, given)])
    note, *lines = capsys.readouterr().out.splitlines()
    assert note == "note: [links] same_kind is missing; 1.25 GB/s assumed, Ethernet of 10 Gbit/s"
    heads = ["train", "sample", "train", "sample", "░", "step", "stale", "cost", "next"]
    assert [line.split()[0].partition("|")[0] for line in lines[:9]] == heads
    costs = [plan[f"cost_per_{what}"] for what in ("hour", "step", "million_tokens")]
    assert [float(number) for number in re.findall(r"[\d.]+", lines[7])] == pytest.approx(
        costs, rel=0.01
    )
    assert "; 100% of the work, 128 responses a step" in lines[1] and "█" in lines[2]
    waits = [
        1 - plan["training_s"] / plan["step_s"],
        1 - (plan["generation_s"] + plan["update_s"]) / plan["step_s"],
    ]
    for line, share in zip(lines[2:4], waits, strict=True):
        assert line.endswith(f"waits {max(0, share):.0%}")
    assert float(re.search(r"\(([\d.]+)×\)", lines[8])[1]) >= 1
    assert any(line.startswith("torchrun") for line in lines)
    assert any(line.endswith("runs/plan/swarm.key (extras/swarm/README.md)") for line in lines)
    assert lines[-1].startswith("planned in ")


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

SIZES = {
    "groups_per_step": 2,
    "group_size": 2,
    "max_prompt_tokens": 128,
    "max_response_tokens": 2048,
}


@pytest.fixture
def run(tmp_path):
    """A run on one H100 that trained and one that sampled, of 8 steps, as asyncrl/runlog writes it."""
    config = Config(model=folder_of("1.7b"), runs_dir=str(tmp_path), run_name="run", **SIZES)
    directory = RunDirectory(config, num_ranks=1)
    spent = Counter(wait=5 * 10**8, forward_backward=10**9, optimizer=5 * 10**8)
    for step in range(1, 9):
        for member in range(4):
            span = {"started_at": 2.0 * step - 2, "ended_at": 2.0 * step - 1 + 0.25 * member}
            directory.record("trajectory", tokens=50, worker=1, **span)
        metrics = {
            "step": step,
            "tokens/trained": 200.0,
            "tokens/forward": 600.0,
            "tokens/generated": 200 * step,
            "rollout/tokens_per_s": 100.0,
            "worker_time/decoding": 0.75,
            "worker_time/gated": 0.25,
        }
        directory.log_metrics(metrics | time_metrics(spent))
    directory.close()
    change_run(directory.path, "hardware", gpus=["NVIDIA H100 80GB HBM3"] * 2)
    return directory.path


def change_run(run, part, **values):
    info = json.loads((run / "run.json").read_text())
    info[part] |= values
    (run / "run.json").write_text(json.dumps(info))


def test_the_lengths_of_a_run_are_those_of_its_prompts_and_responses(run):
    config = Config(max_prompt_tokens=500, max_response_tokens=2048)
    lengths = lengths_of(load(run), config, None)
    assert (lengths.prompt, lengths.response, lengths.longest) == (100, 50, pytest.approx(50))
    assert lengths_of(load(run), Config(max_response_tokens=40), 20.0).longest == pytest.approx(40)
    for sharing in (True, "prompt", "tree"):  # where prefixes were read once, nothing says how long
        change_run(run, "config", share_prefix=sharing)
        assert lengths_of(load(run), config, None).prompt == 500


def test_a_runs_rates_are_those_of_the_planner_for_the_same_gpu_and_job(run, write):
    """It trained 200 tokens in 1 s, beside 0.5 s of AdamW, and sampled for 1.5 s of a step."""
    path = write('[[machines]]\ngpu = "H100 SXM"\ngpus = 2\n[[machines]]\ngpu = "H20"\ngpus = 1\n')
    cluster, note = with_rates(read_cluster(path)[0], load(run))
    measured, other = cluster.pools
    assert (other.mfu, other.hbm_efficiency) == (0.4, 0.7) and "H100 SXM has mfu" in note
    config = Config(**SIZES)
    job = Job(config, shape_of("1.7b"), lengths_of(load(run), config, None))
    training = Training(measured, 1, 1, 1, (), 1, False)
    assert compute_s(job, training) == pytest.approx(1.0)
    requests = 4 * (1 + 1.25 + 1.5 + 1.75) / 4 / 1.5
    assert make_engine(job, measured, 1, requests).rate == pytest.approx(200 / 1.5)


def test_a_run_on_what_the_cluster_has_not_gives_its_lengths_alone(run, write, capsys):
    given = (write(MACHINES), *GIVEN, "--workload", run)
    (note,) = planned(capsys, *given)["notes"]
    assert "ran on NVIDIA H100 80GB HBM3: its lengths are taken" in note
    change_run(run, "config", listen="0.0.0.0:29600")
    _, note = with_rates(read_cluster(write(MACHINES.replace("H800", "H100 SXM")))[0], load(run))
    assert "ran on machines that joined it, too" in note
    (run / "events.jsonl").write_text("")
    line = "has no response; give a run that has trained, or --lengths"
    assert line in refusal(*given)


def test_lognormal_lengths_are_cut_at_the_longest_allowed():
    lengths = read_lengths("lognormal:100,1", Config(max_response_tokens=5000), None)
    assert lengths.response == pytest.approx(100 * 2.718281828**0.5, rel=0.01)
    assert lengths.prompt == 40
    shorter = read_lengths("lognormal:100,1", Config(max_response_tokens=120), None)
    assert shorter.longest == pytest.approx(120)


def test_every_data_sheet_is_whole_and_has_a_source():
    for name, sheet in tomllib.loads(planner.SHEETS.read_text()).items():
        assert len(sheet.pop("source")) > 10 and sheet["called"]
        pool = Pool(name, name, 1, 1, 0.0, **sheet)
        rates = (pool.flops_per_s, pool.hbm_bytes_per_s, pool.gb_per_s, pool.device.total_bytes)
        assert min(rates) > 10
