"""The planner's command: what it reads, refuses and prints; its arithmetic is
extras/planning/tests/test_planner.py's."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from plan_oracle import check_plan
from qwen3_models import folder_of, shape_of
from real_job import words_of
from test_planner import cluster, job, pool
from written_run import write_run

from asyncrl.config import Config
from extras.planning import planner
from extras.planning.advice import config_of
from extras.planning.plan_inputs import (
    lengths_of,
    make_cluster,
    read_cluster,
    read_lengths,
    with_rates,
)
from extras.planning.planner import Job, Training, compute_s, make_engine
from scripts.plan import Arguments, main, plan

MACHINES = """\
[[machines]]
gpu = "H800"
gpus = 1
price_per_hour = 2
[[machines]]
gpu = "H20"
gpus = 4
price_per_hour = 1
mfu = 0.1
[links]
across_kinds = 50
"""
"""One H800 trains, H20 that compute badly join."""
EXAMPLES = Path(planner.__file__).parent / "clusters"
OPTIONS = {
    "model": folder_of("1.7b"),
    "groups_per_step": 16,
    "max_prompt_tokens": 512,
    "max_response_tokens": 2048,
}
GIVEN = words_of(OPTIONS)


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


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if place == 0 else pytest.mark.slow)
        for place, path in enumerate(sorted(EXAMPLES.glob("*.toml")))
    ],
    ids=lambda path: path.stem,
)
def test_the_plans_of_our_examples_can_be_run(path):
    """The fastest plan, and a slower one for which GPUs stay idle."""
    cluster, _ = read_cluster(path)
    fastest, _, _ = plan(Arguments(path), GIVEN)
    wanted = 0.85 * fastest.split.job.tokens / fastest.step_s
    slower, _, _ = plan(Arguments(path, tokens_per_s=wanted), GIVEN)
    assert slower.cost_per_hour <= fastest.cost_per_hour
    for candidate in (fastest, slower):
        config = check_plan(candidate, cluster)
        assert config == dataclasses.replace(config, **OPTIONS)


def test_engines_of_another_size_join_with_a_number_of_gpus_of_their_own():
    c = cluster(pool("near", 1, 4), pool("far", 1, 4))
    wanted = {True: (2, 1), False: (4, 1)}
    split = next(s for s in planner.splits(job(), c) if len(s.sites) == 2 and s.sites[0].trains)
    row = [
        [(tp, count) for tp, count, _ in site.choices].index(wanted[site.trains])
        for site in split.sites
    ]
    check_plan(planner.make_plan(split, row), c)


def test_people_get_the_commands_and_the_next_best_plans(write, capsys):
    given = (write(MACHINES), *GIVEN, "--lengths", "lognormal:500,0.7")
    plan = planned(capsys, *given)
    per_s = plan["cost_per_hour"] / 3600
    assert plan["cost_per_step"] == pytest.approx(per_s * plan["step_s"])
    assert plan["cost_per_million_tokens"] == pytest.approx(per_s / plan["tokens_per_s"] * 1e6)
    assert (plan["train"], plan["rollout"]) == ({"H800": 1}, {"H20": 4})
    assert (plan["transport"], plan["max_staleness"]) == ("pull", 1)
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
        (MACHINES.replace("gpus = 1", "gpus = 1\nmfu = nan"), GIVEN, "$.mfu"),
        (MACHINES.replace("gpus = 1", "gpus = 1\nmemory_gib = inf"), GIVEN, "$.memory_gib"),
        (MACHINES, (), "--model is missing"),
        (MACHINES, (*GIVEN, "--tokens-per-s", -1), "--tokens-per-s must be above 0, got -1.0"),
        (MACHINES, (*GIVEN, "--prompt-tokens", 513), "is above --max-prompt-tokens"),
        (MACHINES, (*GIVEN, "--workload", "nowhere"), "does not exist"),
        (MACHINES, (*GIVEN, "--scheduling", "batch"), "--listen"),
        (
            MACHINES.replace("gpus = 1", "gpus = 1\nsampled_tokens_per_s = 1e9"),
            GIVEN,
            "H800: sampled_tokens_per_s 1e+09 is too high. With 128 requests",
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
    run.metrics["tokens/saved_share"] = 0.25
    run.metrics["tokens/forward"] *= 0.75
    assert lengths_of(run, config, None).prompt == pytest.approx(100)


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
    *_, note = planned(capsys, *given)["notes"]
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
