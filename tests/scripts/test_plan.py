"""The planner's command: what it reads, refuses and prints; its arithmetic is tests/cluster/test_planner.py's."""

import dataclasses
import json
import shlex
import tomllib
from pathlib import Path

import pytest

from cluster.cluster import check_shares
from cluster.planner import Pool
from config import Config
from job.command_line import parse_config
from scripts import plan as script
from scripts.plan import main, options_of, read_cluster, read_lengths
from scripts.qwen3_shapes import qwen3_config

EXAMPLES = sorted((Path(script.__file__).parent / "plan").glob("*.toml"))
MACHINES = (
    '[[machines]]\ngpu = "H800"\ngpus = 4\nprice_per_hour = 5.0\n[[machines]]\ngpu = "H20"\ngpus = 8\ncount = 2\n'
)
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
    assert found["step_s"] >= max(found["training_s"], found["generation_s"] + found["update_s"]) * (1 - 1e-9)
    assert 1 <= len(found["next"]) <= 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_make_plans_whose_commands_a_run_accepts(example, model, capsys):
    found = planned(capsys, example, "--model", model, *JOB)
    trainer, *others = found["commands"]
    config, words = trainer_config(trainer["command"]), shlex.split(trainer["command"])
    machines = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    ranks = machines * int(words[words.index("--nproc-per-node") + 1])
    assert sum(found["train"].values()) == ranks
    check_shares(config, machines, ranks)
    assert config.model == model and config.groups_per_step == 16
    assert all("rollout.py --join HOST0:" in other["command"] for other in others)
    assert bool(others) == (config.listen is not None)
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
    found = planned(capsys, write(tmp_path, '[[machines]]\ngpu = "H200"\ngpus = 1\n'), "--model", model, *JOB)
    (line,) = found["commands"]
    assert trainer_config(line["command"]).colocate == "share" and found["transport"] == "ipc"
    assert found["rollout"] == {} and found["cost_per_million_tokens"] == 0


def test_links_that_are_missing_are_assumed_and_said(tmp_path, model, capsys):
    path = write(tmp_path, MACHINES)
    cluster, notes = read_cluster(path)
    assert (cluster.same_kind, cluster.across_kinds) == (1.25, 1.25) and len(notes) == 2
    main([str(path), "--model", model, *JOB])
    assert "note: [links] same_kind is missing; 1.25 GB/s assumed" in capsys.readouterr().out


def test_people_get_a_picture_the_next_best_plans_and_the_commands(tmp_path, model, capsys):
    main([str(write(tmp_path, MACHINES + LINKS)), "--model", model, *JOB, "--lengths", "lognormal:500,0.7"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train ") and any("█" in line for line in lines)
    assert sum("an hour; " in line for line in lines) == 3
    assert any(line.startswith("torchrun") for line in lines) and lines[-1].startswith("planned in ")


def test_data_sheets_may_be_overridden_and_two_lists_of_a_kind_are_told_apart(tmp_path):
    text = '[[machines]]\ngpu = "L4"\ngpus = 2\nmfu = 0.3\ngb_per_s = 10\n[[machines]]\ngpu = "L4"\ngpus = 1\n'
    pools = read_cluster(write(tmp_path, text))[0].pools
    assert [pool.name for pool in pools] == ["L4", "L4 (2)"] and pools[1].gpu == "L4"
    assert (pools[0].mfu, pools[0].gb_per_s, pools[1].mfu, pools[1].gb_per_s) == (0.3, 10, 0.4, 32)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[machines]]\ngpu = "H8000"\ngpus = 8\n', "gpu 'H8000' is none of B200, .*; did you mean H800?"),
        ('[[machines]]\ngpu = "H800"\n', "H800: gpus is missing"),
        ('[[machines]]\ngpu = "H800"\ngpus = 0\n', "gpus must be a whole number above 0, got 0"),
        ('[[machines]]\ngpu = "H800"\ngpus = 2.5\n', "gpus must be a whole number above 0, got 2.5"),
        (
            '[[machines]]\ngpu = "H800"\ngpus = 1\nprice_hour = 2\n',
            "price_hour is none of .*; did you mean price_per_hour?",
        ),
        ('[[machines]]\ngpu = "H800"\ngpus = 1\nprice_per_hour = -1\n', "price_per_hour must be a number at least 0"),
        (MACHINES + "[links]\nsame_kinds = 5\n", "same_kinds is none of .*; did you mean same_kind?"),
        (MACHINES + '[links]\nsame_kind = "5"\n', "same_kind must be a number above 0, got '5'"),
        ("[links]\nsame_kind = 5\n", r"lists no \[\[machines\]\]"),
        ("[[machines\n", "cannot be read"),
        ('[machines]\ngpu = "H800"\n', r"lists no \[\[machines\]\]"),
    ],
)
def test_mistakes_in_the_file_are_one_line(tmp_path, model, text, says):
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        read_cluster(write(tmp_path, text))
    assert refusal(write(tmp_path, text), "--model", model, *JOB).startswith("error: ")


def test_mistakes_on_the_command_line_are_one_line(tmp_path, model):
    path = write(tmp_path, MACHINES + LINKS)
    assert "cannot be read" in refusal(tmp_path / "none.toml", "--model", model)
    assert "--lengths takes lognormal:MEDIAN,SIGMA" in refusal(path, "--model", model, "--lengths", "normal:3")
    assert "--model is missing" in refusal(path)
    assert "--tokens-per-s must be above 0, got -1.0" in refusal(path, "--model", model, "--tokens-per-s", -1)
    assert "is above --max-prompt-tokens" in refusal(path, "--model", model, "--prompt-tokens", 41)
    clash = refusal(write(tmp_path, JOINING), "--model", model, *JOB, "--scheduling", "batch")
    assert "--listen" in clash and "--scheduling batch" in clash
    assert "did you mean --async-ratio" in refusal(path, "--model", model, "--async-rato", 1)
    assert "no plan has 1e+12 tokens/s" in refusal(path, "--model", model, *JOB, "--tokens-per-s", 1e12)


def test_a_model_that_fits_nowhere_is_refused_with_the_arithmetic(tmp_path):
    qwen3_config("8b", num_hidden_layers=200).save_pretrained(tmp_path / "large")
    text = '[[machines]]\ngpu = "L4"\ngpus = 1\n'
    said = refusal(write(tmp_path, text), "--model", tmp_path / "large", *JOB)
    assert "L4 has 21.6 GiB" in said and "parameters × 2 B / 1 GPUs" in said


def test_the_lengths_of_a_run_are_those_of_its_responses(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    events = [{"event": "trajectory", "time": 1.0, "tokens": tokens} for tokens in (10, 30, 0)]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    lengths = read_lengths(None, str(run), Config(), 20.0)
    assert (lengths.prompt, lengths.response, lengths.longest) == (20, 20, 30)


def test_lognormal_lengths_are_cut_at_the_longest_allowed():
    lengths = read_lengths("lognormal:100,1", None, Config(max_response_tokens=5000), None)
    assert lengths.response == pytest.approx(100 * 2.718281828**0.5, rel=0.01) and lengths.prompt == 40
    assert read_lengths("lognormal:100,1", None, Config(max_response_tokens=120), None).longest == 120


def test_the_options_of_a_config_make_it_again():
    config = Config(model="m", save_memory=("activations", "optimizer"), async_ratio=2.0, replicate_prompts=False)
    config = dataclasses.replace(config, share_prefix=True, algo_args=("clip_high=0.28",), algo="tis")
    assert parse_config(options_of(config)) == config


def test_every_data_sheet_is_whole_and_has_a_source():
    for name, sheet in tomllib.loads(script.SHEETS.read_text()).items():
        assert set(sheet) == {"tflops", "hbm_gb_per_s", "memory_gib", "gb_per_s", "source"}, name
        numbers = {key: value for key, value in sheet.items() if key != "source"}
        assert all(value > 0 for value in numbers.values()) and len(sheet["source"]) > 10
        assert Pool(name, name, 1, 1, 0.0, **numbers).device.total_bytes > 2**30
