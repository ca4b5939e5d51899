"""The command line of a run with user code: found, tried, recorded, and loaded again when the run is resumed."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from option_words import words_that_change
from programs import ROOT
from user_files import ENVIRONMENT, LOSS, TASK, write_user_code

from asyncrl import user_code
from asyncrl.cluster.fingerprint import check_same, fingerprint
from asyncrl.config import OPTIONS, Config, OptimOptions, with_home_folder
from asyncrl.job.command_line import (
    OPTIONS_OF_OTHER_PROJECTS,
    WORDS_OF_OTHER_PROJECTS,
    as_toml,
    parse_config,
    read_options,
)
from asyncrl.runlog.run_directory import RunDirectory

REWARD = "def score(response, answer): return 1.0\n"
ADVANTAGE = "def centered(rewards): return rewards - rewards.mean()\n"


def test_user_code_is_resolved_from_where_the_run_is_started(tmp_path, monkeypatch):
    sources = (TASK, LOSS, REWARD, ENVIRONMENT, ADVANTAGE)
    task, loss, reward, environment, advantage = (
        write_user_code(tmp_path, source) for source in sources
    )
    monkeypatch.chdir(tmp_path)
    words = ["--task", f"{task.name}:Double", "--task-args", "factor=3"]
    words += ["--algo", f"./{loss.name}:loss", "--algo-args", "clip=0.3"]
    words += ["--advantage", f"{advantage.name}:centered"]
    config = parse_config([*words, "--reward", f"{reward.name}:score*0.5"])
    assert config.advantage == f"{advantage}:centered"
    assert (config.task, config.algo) == (f"{task}:Double", f"{loss}:loss")
    assert config.reward == (f"{reward}:score*0.5",) and not config.is_multi_turn
    assert Config.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    config = parse_config(["--task", f"{environment}:Echo"])
    assert config.task == f"environment:{environment}:Echo" and config.is_multi_turn
    assert parse_config(["--task", config.task]) == config


def test_a_loss_may_couple_an_update_and_a_reward_take_the_place_of_a_score(tmp_path):
    coupled = LOSS.replace("def loss(inputs", "def loss(inputs, update", 1)
    coupled = coupled.replace("ratio = ", "update.advantages.mean()\n    ratio = ", 1)
    assert parse_config(["--algo", f"{write_user_code(tmp_path, coupled)}:loss"])
    no_score = TASK.replace("    @staticmethod\n    def score(", "    def score(self, ")
    task, reward = write_user_code(tmp_path, no_score), write_user_code(tmp_path, REWARD)
    assert parse_config(["--task", f"{task}:Double", "--reward", f"{reward}:score"])


def test_help_for_a_loss_lists_its_keyword_arguments_with_defaults_and_ranges(tmp_path, capsys):
    lines = {
        "tis": "clip_low=0.0                ≥ 0 and ≤ 1",
        "grpo": "dual_clip=None              > 1",
        "dppo": "divergence=tv               tv or kl",
        f"{write_user_code(tmp_path, LOSS)}:loss": "  clip=0.2",
    }
    for algo, line in lines.items():
        with pytest.raises(SystemExit) as end:
            parse_config(["--algo", algo, "--help"])
        assert end.value.code == 0 and line in capsys.readouterr().out


def test_the_options_of_another_run_are_defaults_by_like(tmp_path):
    options = {"lr": 0.5, "algo_args": ("clip_low=0.1",), "steps": 7}
    RunDirectory(Config(runs_dir=str(tmp_path), run_name="one", **options)).close()
    run = str(tmp_path / "one")
    config = read_options(["--like", run, "--steps", "9"])
    assert (config.lr, config.algo_args, config.steps) == (0.5, ("clip_low=0.1",), 9)
    assert config.run_name is None, "its name is taken"
    with pytest.raises(ValueError, match=r"^--like .*: no run is there .*, runs/NAME$"):
        read_options(["--like", "nowhere"])
    with pytest.raises(ValueError, match=rf"^--like .*: no run is there .*; did you mean {run}\?$"):
        read_options(["--like", f"{tmp_path}/oen"])
    with pytest.raises(ValueError, match="--like does not go with --resume"):
        read_options(["--like", run, "--resume", run])


@pytest.fixture
def user_run(tmp_path):
    """A run with a task and a loss of the user's, one of which has a sibling."""
    folder = tmp_path / "mine"
    sibling = write_user_code(folder, "x = 1\n")
    loss = write_user_code(folder, f"import {sibling.stem}\n{LOSS}")
    task = write_user_code(folder, TASK)
    words = ["--task", f"{task}:Double", "--algo", f"{loss}:loss"]
    config = read_options([*words, "--runs-dir", str(tmp_path / "runs")])
    user_code.load(config.algo)
    directory = RunDirectory(config)
    directory.close()
    return directory.path, config, [loss, sibling, task]


def test_a_resumed_run_loads_its_copies_from_where_it_is_though_the_files_have_changed(
    user_run, tmp_path
):
    run, config, files = user_run
    loss, sibling, task = files
    assert f"{task.stem}-Double-{loss.stem}-loss-a1-s0" in run.name
    texts = {path.name: path.read_text() for path in files}
    run = Path(shutil.move(run, tmp_path / "moved"))
    assert {path.name: path.read_text() for path in (run / "code").iterdir()} == texts
    for path in files:
        path.write_text("x = (\n")
    resumed = read_options(["--resume", str(run)])
    assert read_options(["--resume", str(run), "--algo", config.algo]) == resumed
    copies = user_code.with_absolute_paths(config, run / "code")
    assert user_code.user_code_names(resumed) == user_code.user_code_names(copies)
    loaded = user_code.load(resumed.algo)
    modules = (sys.modules[loaded.__module__], loaded.__globals__[sibling.stem])
    places = [str(run / "code" / path.name) for path in (loss, sibling)]
    assert [module.__file__ for module in modules] == places
    with pytest.raises(ValueError, match=r"code/another.py:loss cannot change when a run is"):
        read_options(["--resume", str(run), "--algo", "another.py:loss"])


def test_nodes_with_other_user_code_are_refused_by_name(user_run):
    _, config, (loss, *_) = user_run
    first = fingerprint(config)
    loss.write_text(LOSS + "\n")
    line = rf"{loss} \w+ instead of \w+; .*start all nodes from one commit"
    with pytest.raises(ValueError, match=line):
        check_same({"node 0": first, "node 1": fingerprint(config)})


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["--runs-dir=~/x"], "runs_dir"),
        (["--runs-dir", "~/x"], "runs_dir"),
        (["--data-path=~/x"], "data_path"),
        (["--model=~/x"], "model"),
        (["--swarm.snapshots=~/x"], "swarm.snapshots"),
    ],
)
def test_a_path_may_begin_at_home_also_behind_an_equals_sign(words, path, tmp_path, monkeypatch):
    """There a shell does not know that it is a path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_options(words).as_dict()[path] == f"{tmp_path}/x"


@pytest.mark.parametrize("option", ["--resume", "--like"])
def test_a_run_may_be_below_home(option, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=f"^{option} {tmp_path}/runs/one: no run is there"):
        read_options([f"{option}=~/runs/one"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--task=agent:~/a.py:run", "--task=agent:HOME/a.py:run"),
        ("--reward=~/a.py:f*0.5", "--reward=HOME/a.py:f*0.5"),
        ("system=~/prompt.txt", "system=HOME/prompt.txt"),
        ("--out=~", "--out=HOME"),
        ("system=about ~/x", "system=about ~/x"),
        ("--task=agent:python ~/a.py", "--task=agent:python ~/a.py"),
        ("a~/b", "a~/b"),
        ("--run-name=~x~", "--run-name=~x~"),
    ],
)
def test_home_is_put_where_a_path_begins_and_nowhere_else(word, expected, monkeypatch):
    monkeypatch.setenv("HOME", "HOME")
    assert with_home_folder([word]) == [expected]


def test_names_of_the_last_release_are_accepted_with_a_warning(capsys):
    assert not read_options(["--optim.no-by-ess"]).optim.scale_lr_by_ess
    line = "warning: --optim.no-by-ess is --optim.no-scale-lr-by-ess now\n"
    assert capsys.readouterr().err == line
    words = ["--optim.warmup=7", "--optim.by-ess", "--advantage.overlong", "3"]
    config = read_options(words)
    assert config.optim == OptimOptions(warmup_steps=7, scale_lr_by_ess=True)
    assert config.advantage_options.overlong_tokens == 3
    warning, *others = capsys.readouterr().err.splitlines()
    assert warning == "warning: --optim.warmup is --optim.warmup-steps now" and len(others) == 2
    recorded = {name: option.default for name, option in OPTIONS.items()} | {"optim.least": 0.5}
    del recorded["optim.min_lr_ratio"]
    assert Config.from_dict(recorded).optim.min_lr_ratio == 0.5


@pytest.mark.parametrize("value", ["disabled", "offline", "online"])
def test_an_option_that_is_several_today_is_accepted_with_a_warning(value, capsys):
    trackers = {
        "disabled": ("none", "online", "--tracker none"),
        "offline": ("wandb", "offline", "--tracker wandb --tracker-mode offline"),
        "online": ("wandb", "online", "--tracker wandb --tracker-mode online"),
    }
    tracker, mode, words = trackers[value]
    config = read_options(["--wandb", value, "--wandb-project=mine"])
    assert (config.tracker, config.tracker_mode, config.tracker_project) == (tracker, mode, "mine")
    lines = capsys.readouterr().err.splitlines()
    assert f"warning: --wandb {value} is {words} now" in lines and len(lines) == 2
    assert read_options(["--tracker", "trackio", f"--wandb={value}"]).tracker == "trackio"


def test_a_run_of_the_last_release_is_resumed(tmp_path):
    path = tmp_path / "one"
    RunDirectory(Config(runs_dir=str(tmp_path), run_name="one")).close()
    header = json.loads((path / "run.json").read_text())
    for name in ("tracker", "tracker_mode", "tracker_project", "optim.warmup_steps"):
        del header["config"][name]
    header["config"] |= {"wandb": "offline", "wandb_project": "mine", "optim.warmup": 7}
    (path / "run.json").write_text(json.dumps(header))
    config = read_options(["--resume", str(path)])
    assert (config.tracker, config.tracker_mode, config.tracker_project) == (
        "wandb",
        "offline",
        "mine",
    )
    assert config.optim.warmup_steps == 7


@pytest.mark.parametrize("words", WORDS_OF_OTHER_PROJECTS)
def test_the_words_for_options_of_other_projects_are_read_here(words):
    flags = set(re.findall(r"--[\w.-]+", words))
    known = {option.flag for option in OPTIONS.values()}
    of_torchrun = {"--nnodes", "--nproc-per-node"}
    assert flags <= known | of_torchrun and (flags or words.startswith("nothing"))
    for option in WORDS_OF_OTHER_PROJECTS[words].split():
        assert OPTIONS_OF_OTHER_PROJECTS[option] == words and f"--{option}" not in known
        for word in (f"--{option}", f"--section.{option}"):
            with pytest.raises(ValueError, match=r"^--") as refusal:
                read_options([word])
            assert f"{word} is no option; write {words} (" in str(refusal.value)


def write_config(folder, text, name="run.toml"):
    """A file for --config, and the words that name it."""
    path = folder / name
    path.write_text(text)
    return ["--config", str(path)]


def test_a_file_has_options_and_the_command_line_wins_over_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    words = write_config(
        tmp_path,
        """
        model = "~/model"
        group-size = 4
        lr = 1e-5
        save_every = "None"
        algo_args = "clip_high=0.3"
        task_args = ["test=~/held.jsonl"]
        drop_zero_variance = true
        wandb = "offline"
        swarm.refresh_lag = 2
        advantage = "gae"
        "advantage.overlong-tokens" = 7
        [optim]
        warmup_steps = 3
        """,
    )
    config = read_options([*words, "--lr", "None", "--optim.epochs=2", "--group-size=16"])
    assert (config.model, config.lr, config.group_size) == ("/home/me/model", None, 16)
    assert config.max_prompt_tokens == 512, "the default of such a model"
    assert config.save_every is None and config.drop_zero_variance
    assert config.algo_args == ("clip_high=0.3",)
    assert config.task_args == ("test=/home/me/held.jsonl",)
    assert (config.tracker, config.tracker_mode) == ("wandb", "offline")
    assert config.optim == OptimOptions(warmup_steps=3, epochs=2)
    assert config.swarm.refresh_lag == 2 and config.advantage_options.overlong_tokens == 7


def test_a_run_json_is_a_file_of_options(tmp_path):
    options = {"lr": 0.5, "algo_args": ("clip_low=0.1",), "optim": OptimOptions(warmup_steps=2)}
    path = RunDirectory(Config(runs_dir=str(tmp_path), run_name="taken", **options)).path
    config = read_options(["--config", str(path / "run.json")])
    assert config == Config(runs_dir=str(tmp_path), **options)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps = 0", "steps: --steps must be a whole number ≥ 1, got 0"),
        ("steps = true", "steps: --steps must be a whole number ≥ 1, got True"),
        ("lr = [1]", "lr: --lr must be > 0, got '1'"),
        ("[optim]\nlr-scheduler = 'step'", "optim.lr-scheduler: --optim.lr-scheduler must be "),
        ("optim.args = ['a']", "optim.args: --optim.args must be NAME=VALUE"),
        ("async_ration = 2", "async_ration: --async-ration is no option; did you mean --async"),
        ("[optim]\nsteps = 2", "optim.steps: --optim.steps is no option"),
        ("[lr]\nvalue = 2", "lr.value: --lr.value is no option"),
        ("optim = 2", "optim: --optim is no option"),
        ("wandb = 'maybe'", "wandb: --wandb must be disabled or offline or online, got 'maybe'"),
        ("dry_run = true", "dry_run: --dry-run belongs on the command line"),
        ("steps 2", "Expected '=' after a key"),
    ],
)
def test_a_mistake_in_a_file_is_refused_in_one_line_with_file_and_key(text, line, tmp_path):
    words = write_config(tmp_path, text)
    with pytest.raises(ValueError) as refusal:
        read_options(words)
    assert str(refusal.value).startswith(f"--config {words[1]}: {line}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["[]", "{}", '{"config": 1}', "{"])
def test_a_file_that_has_no_options_is_refused_in_one_line(text, tmp_path):
    for words in (write_config(tmp_path, text, "run.json"), ["--config", str(tmp_path / "no")]):
        with pytest.raises(ValueError, match=r"^--config .*; give a TOML file with options, or a"):
            read_options(words)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "resume"])
def test_each_option_that_is_printed_is_read_again(name, tmp_path):
    config = read_options(words_that_change(OPTIONS[name]))
    assert read_options(write_config(tmp_path, as_toml(config))) == config


def test_the_options_of_a_run_are_printed_and_the_print_is_read_again(tmp_path, capsys):
    model = 'a "b" \\ \x7f\n\tü'
    words = ["--model", model, "--save-every", "None", "--optim.args", "eps=1e-5", "beta1=0.8"]
    with pytest.raises(SystemExit) as end:
        parse_config([*words, "--print-config"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "\n[optim]\n" in text
    assert parse_config(write_config(tmp_path, text)) == parse_config(words)


def test_a_python_without_the_packages_ends_in_one_line():
    command = [sys.executable, "-S", ROOT / "train_async.py"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.fullmatch(r"error: \S+ lacks the packages of this code; write .+\n", ended.stderr)
