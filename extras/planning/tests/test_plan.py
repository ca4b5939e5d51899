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

from asyncrl.cluster.cluster import check_shares
from asyncrl.cluster.placement import place
from asyncrl.config import Config
from asyncrl.job.command_line import parse_config
from asyncrl.runlog.metrics import time_metrics
from asyncrl.runlog.run_directory import RunDirectory
from extras.planning import memory, planner
from extras.planning import plan as script
from extras.planning.fit import plan_memory
from extras.planning.plan import options_of
from extras.planning.plan_inputs import lengths_of, read_cluster, read_lengths, with_rates
from extras.planning.planner import Job, Pool, Training, compute_s, make_engine
from extras.planning.shape import read_shape
from scripts.plan import main
from scripts.qwen3_shapes import qwen3_config
from scripts.runs import load

EXAMPLES = sorted((Path(script.__file__).parent / "clusters").glob("*.toml"))
MACHINES = '[[machines]]\ngpu = "H800"\ngpus = 4\nprice_per_hour = 5.0\n'
MACHINES += '[[machines]]\ngpu = "H20"\ngpus = 8\ncount = 2\n'
JOINING = '[[machines]]\ngpu = "H800"\ngpus = 1\nprice_per_hour = 2\n[[machines]]\ngpu = "H20"\ngpus = 8\n'
JOINING += "price_per_hour = 1\nmfu = 0.1\n[links]\nacross_kinds = 50\n"
"""One H800 trains, H20 that compute badly join."""
LINKS = "[links]\nsame_kind = 5\nacross_kinds = 1.5\n"
KEYS = {
    "train", "rollout", "step_s", "generation_s", "training_s", "update_s", "tokens_per_s", "cost_per_million_tokens",
    "planning_s", "commands",
}  # fmt: skip
JOB = ("--groups-per-step", "16", "--max-prompt-tokens", "256", "--max-response-tokens", "2048")


@pytest.fixture
def model(tmp_path):
    """A folder with nothing but its config.json."""
    folder = tmp_path / "model"
    qwen3_config("1.7b").save_pretrained(folder)
    return str(folder)


def write(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


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


def test_the_plan_for_machines_has_all_that_is_promised(tmp_path, model, capsys):
    found = planned(capsys, write(tmp_path, MACHINES + LINKS), "--model", model, *JOB)
    assert set(found) >= KEYS and not found["notes"]
    assert set(found["train"]) | set(found["rollout"]) <= {"H800", "H20"}
    assert found["tokens_per_s"] * found["step_s"] > 16 * 8
    assert found["cost_per_million_tokens"] == pytest.approx(
        found["cost_per_hour"] / 3600 / found["tokens_per_s"] * 1e6
    )
    assert found["step_s"] >= max(
        found["training_s"], found["generation_s"] + found["update_s"]
    ) * (1 - 1e-9)
    assert 1 <= len(found["next"]) <= 3


def number_after(option, command, default):
    found = re.search(rf"{option} (\d+)", command)
    return int(found[1]) if found else default


def check_that_it_fits(command, pool, config, shape, machines, ranks):
    """What a node of the run, or a machine that joins it, checks before it starts; no step of it may be doubtful."""
    visible = re.match(r"CUDA_VISIBLE_DEVICES=(\S+)", command)
    num_gpus = len(visible[1].split(",")) if visible else pool.gpus
    gpus = [pool.device] * num_gpus
    if "--join" in command:
        tp = number_after("--rollout-tp", command, config.rollout_tp)
        config = dataclasses.replace(
            config, num_rollout_workers=None, weight_sync="auto", rollout_tp=tp
        )
        workers = place(config, num_gpus, 64, 0).workers
        assert sum(worker.num_gpus for worker in workers) == num_gpus
        return memory.check_engine(config, shape, pool.device)
    placement = place(config, num_gpus, 64, ranks // machines)
    placement, arithmetic = plan_memory(
        config, placement, shape, gpus, memory.Sharing(ranks, ranks // config.replicas)
    )
    assert "warning" not in arithmetic
    assert len(placement.workers) == (
        1 if config.num_rollout_workers is None else config.num_rollout_workers
    )


@pytest.mark.parametrize("size", ["0.6b", "4b", "8b"])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_planned_fits_by_the_arithmetic_of_those_who_run_it(
    seed, size, tmp_path, capsys
):
    rng, folder = random.Random(seed), tmp_path / "model"
    qwen3_config(size).save_pretrained(folder)
    kinds = rng.sample(
        ["H200", "H20", "A100 40GB", "L40S", "RTX 4090", "H800"], rng.choice([1, 2, 3])
    )
    machines = [(kind, rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 4, 8])) for kind in kinds]
    text = "".join(
        f'[[machines]]\ngpu = "{gpu}"\ncount = {n}\ngpus = {gpus}\n' for gpu, n, gpus in machines
    )
    path, alpha = write(tmp_path, text + LINKS), rng.choice([0, 0.5, 1, 4])
    try:
        found = planned(capsys, path, "--model", folder, *JOB, "--async-ratio", alpha)
    except SystemExit as refused:
        assert "fits on no GPUs" in refused.code or "does not go with" in refused.code
        return
    trainer, *others = (line["command"] for line in found["commands"])
    config, pools = trainer_config(trainer), read_cluster(path)[0].pools
    nodes, ranks = number_after("--nnodes", trainer, 1), sum(found["train"].values())
    assert nodes * number_after("--nproc-per-node", trainer, None) == ranks
    check_shares(config, nodes, ranks)
    assert config == config.checked() and bool(others) == (config.listen is not None)
    assert all("rollout.py --join HOST0:" in other for other in others)
    for line in found["commands"]:
        (pool,) = (pool for pool in pools if line["machines"].endswith(f"× {pool.name}"))
        check_that_it_fits(line["command"], pool, config, read_shape(str(folder)), nodes, ranks)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_make_plans_whose_commands_a_run_accepts(example, model, capsys):
    found = planned(capsys, example, "--model", model, *JOB)
    config = trainer_config(found["commands"][0]["command"])
    assert config.model == model and config.groups_per_step == 16
    assert 0 < found["planning_s"] < 20, "a tenth of a second where nothing else runs"


def test_sleeping_is_for_one_gpu_and_dropped_where_each_side_has_its_own(tmp_path, model, capsys):
    options = (*JOB, "--async-ratio", 0, "--colocate", "sleep")
    found = planned(capsys, write(tmp_path, MACHINES + LINKS), "--model", model, *options)
    assert found["transport"] != "ipc"
    assert trainer_config(found["commands"][0]["command"]).colocate == "share"


def test_gpus_that_stay_idle_are_hidden_from_a_machine_that_joins(tmp_path, model, capsys):
    given = (write(tmp_path, JOINING), "--model", model, *JOB)
    wanted = 0.85 * planned(capsys, *given)["tokens_per_s"]
    found = planned(capsys, *given, "--tokens-per-s", wanted)
    assert found["tokens_per_s"] >= wanted * (1 - 1e-6)
    assert found["train"] == {"H800": 1} and 0 < found["rollout"]["H20"] < 8
    (join,) = found["commands"][1:]
    shown = join["command"].removeprefix("CUDA_VISIBLE_DEVICES=").split()[0]
    assert shown == ",".join(map(str, range(found["rollout"]["H20"])))


def test_one_gpu_trains_and_samples_by_one_command(tmp_path, model, capsys):
    found = planned(
        capsys, write(tmp_path, '[[machines]]\ngpu = "H200"\ngpus = 1\n'), "--model", model, *JOB
    )
    (line,) = found["commands"]
    assert trainer_config(line["command"]).colocate == "share" and found["transport"] == "ipc"
    assert found["rollout"] == {} and found["cost_per_million_tokens"] == 0


def test_people_get_a_picture_the_next_best_plans_and_the_commands(tmp_path, model, capsys):
    path = write(tmp_path, MACHINES + "[links]\nacross_kinds = 1.5\n")
    main([str(path), "--model", model, *JOB, "--lengths", "lognormal:500,0.7"])
    note, *lines = capsys.readouterr().out.splitlines()
    assert note.startswith("note: [links] same_kind is missing; 1.25 GB/s assumed")
    assert read_cluster(path)[0].same_kind == 1.25
    assert lines[0].startswith("train ") and any("█" in line for line in lines)
    assert sum("an hour; " in line for line in lines) == 3
    assert any(line.startswith("torchrun") for line in lines) and lines[-1].startswith(
        "planned in "
    )


def test_data_sheets_may_be_overridden_and_two_lists_of_a_kind_are_told_apart(tmp_path):
    text = '[[machines]]\ngpu = "L4"\ngpus = 2\nmfu = 0.3\ngb_per_s = 10\n[[machines]]\ngpu = "L4"\ngpus = 1\n'
    pools = read_cluster(write(tmp_path, text))[0].pools
    assert [pool.name for pool in pools] == ["L4", "L4 (2)"] and pools[1].gpu == "L4"
    assert (pools[0].mfu, pools[0].gb_per_s, pools[1].mfu, pools[1].gb_per_s) == (0.3, 10, 0.4, 32)


def test_mistakes_on_the_command_line_are_one_line(tmp_path, model):
    assert "cannot be read" in refusal(write(tmp_path, "[[machines"), "--model", model)
    path = write(tmp_path, MACHINES + LINKS)
    assert "--model is missing" in refusal(path)
    assert "--tokens-per-s must be above 0, got -1.0" in refusal(
        path, "--model", model, "--tokens-per-s", -1
    )
    assert "is above --max-prompt-tokens" in refusal(path, "--model", model, "--prompt-tokens", 513)
    clash = refusal(write(tmp_path, JOINING), "--model", model, *JOB, "--scheduling", "batch")
    assert "--listen" in clash and "--scheduling batch" in clash
    assert "did you mean --async-ratio" in refusal(path, "--model", model, "--async-rato", 1)


SIZES = {
    "groups_per_step": 2,
    "group_size": 2,
    "max_prompt_tokens": 128,
    "max_response_tokens": 2048,
}


@pytest.fixture
def run(tmp_path, model):
    """A run on one H100 that trained and one that sampled, of 8 steps, as asyncrl/runlog writes it."""
    config = Config(model=model, runs_dir=str(tmp_path), run_name="run", **SIZES)
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
    gpus = ["NVIDIA H100 80GB HBM3"] * 2
    change_run(directory.path, lambda info: info["hardware"].update(gpus=gpus))
    return directory.path


def change_run(run, change):
    info = json.loads((run / "run.json").read_text())
    change(info)
    (run / "run.json").write_text(json.dumps(info))


def test_the_lengths_of_a_run_are_those_of_its_prompts_and_responses(run):
    lengths = lengths_of(load(run), Config(max_prompt_tokens=500, max_response_tokens=2048), None)
    assert (lengths.prompt, lengths.response, lengths.longest) == (100, 50, pytest.approx(50))
    assert lengths_of(load(run), Config(max_response_tokens=40), 20.0).longest == pytest.approx(40)


@pytest.mark.parametrize("sharing", [True, "prompt", "tree"])
def test_the_prompts_of_a_run_that_read_prefixes_once_are_not_told_by_the_tokens_it_read(
    run, sharing
):
    change_run(run, lambda info: info["config"].update(share_prefix=sharing))
    assert lengths_of(load(run), Config(max_prompt_tokens=500), None).prompt == 500


def test_a_runs_rates_are_those_of_the_planner_for_the_same_gpu_and_job(run, tmp_path):
    path = write(
        tmp_path, '[[machines]]\ngpu = "H100 SXM"\ngpus = 2\n[[machines]]\ngpu = "H20"\ngpus = 1\n'
    )
    cluster, note = with_rates(read_cluster(path)[0], load(run))
    measured, other = cluster.pools
    assert (other.mfu, other.hbm_efficiency) == (0.4, 0.7) and "H100 SXM has mfu" in note
    config = Config(**SIZES)
    job = Job(
        config, read_shape(load(run).info["config"]["model"]), lengths_of(load(run), config, None)
    )
    training = Training(measured, 1, 1, 1, (), 1, False)
    assert compute_s(job, training) == pytest.approx(1.0), "for 200 tokens, and 0.5 s of AdamW"
    requests = 4 * (1 + 1.25 + 1.5 + 1.75) / 4 / 1.5
    assert make_engine(job, measured, 1, requests).rate == pytest.approx(200 / 1.5), (
        "while it decoded"
    )


def test_a_run_on_what_the_cluster_has_not_gives_its_lengths_alone(run, model, tmp_path, capsys):
    main([str(write(tmp_path, MACHINES + LINKS)), "--model", model, *JOB, "--workload", str(run)])
    note, *_ = capsys.readouterr().out.splitlines()
    assert note.startswith("note: ")
    assert "ran on NVIDIA H100 80GB HBM3: its lengths are taken" in note
    change_run(run, lambda info: info["config"].update(listen="0.0.0.0:29600"))
    _, note = with_rates(
        read_cluster(write(tmp_path, MACHINES.replace("H800", "H100 SXM")))[0], load(run)
    )
    assert "ran on machines that joined it, too" in note
    (run / "events.jsonl").write_text("")
    said = refusal(write(tmp_path, MACHINES + LINKS), "--model", model, *JOB, "--workload", run)
    assert "has no response; give a run that has trained, or --lengths" in said
    assert "does not exist" in refusal(
        write(tmp_path, MACHINES), "--model", model, "--workload", tmp_path / "none"
    )


def test_rates_of_a_bench_take_the_place_of_efficiencies(tmp_path, model, capsys):
    text = (
        '[[machines]]\ngpu = "H20"\ngpus = 8\ntrained_tokens_per_s = 5000\nsampled_tokens_per_s = {}\n'
        + LINKS
    )
    slow, fast = (
        planned(capsys, write(tmp_path, text.format(rate)), "--model", model, *JOB)
        for rate in (200, 800)
    )
    assert fast["tokens_per_s"] > 1.5 * slow["tokens_per_s"]
    said = refusal(write(tmp_path, text.format(10**9)), "--model", model, *JOB)
    assert "H20 is said to sample 1e+09 tokens/s per GPU" in said and "lower host_s" in said


def test_lognormal_lengths_are_cut_at_the_longest_allowed():
    lengths = read_lengths("lognormal:100,1", Config(max_response_tokens=5000), None)
    assert (
        lengths.response == pytest.approx(100 * 2.718281828**0.5, rel=0.01) and lengths.prompt == 40
    )
    assert read_lengths(
        "lognormal:100,1", Config(max_response_tokens=120), None
    ).longest == pytest.approx(120)


def test_the_options_of_a_config_make_it_again():
    config = Config(
        model="m",
        save_memory=("activations", "optimizer"),
        async_ratio=2.0,
        replicate_prompts=False,
    )
    config = dataclasses.replace(
        config, share_prefix="prompt", algo_args=("clip_high=1.28",), algo="tis"
    )
    assert parse_config(options_of(config)) == config


def test_every_data_sheet_is_whole_and_has_a_source():
    for name, sheet in tomllib.loads(planner.SHEETS.read_text()).items():
        assert set(sheet) == {
            "called",
            "tflops",
            "hbm_gb_per_s",
            "memory_gib",
            "gb_per_s",
            "source",
        }, name
        numbers = {key: value for key, value in sheet.items() if key not in ("called", "source")}
        assert all(value > 0 for value in numbers.values()) and len(sheet["source"]) > 10
        assert Pool(name, name, 1, 1, 0.0, **numbers).device.total_bytes > 2**30
