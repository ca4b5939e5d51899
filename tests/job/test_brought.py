"""The command line of a run with something of the user's own: found, looked at, recorded, and gone on with."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from own_files import ENVIRONMENT, LOSS, TASK, write_own

from asyncrl import user_code as own
from asyncrl.config import Config
from asyncrl.job.command_line import parse_config, read_options
from asyncrl.runlog.fingerprint import check_same, fingerprint
from asyncrl.runlog.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]


def refusal(capsys, *args) -> str:
    """The line that a command line is refused with, before anything is started or written."""
    with pytest.raises(SystemExit) as exit_:
        parse_config(list(args))
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and line.startswith("error: ")
    return line


def test_what_the_user_brings_is_resolved_from_where_the_run_is_started(tmp_path, monkeypatch):
    task, loss = write_own(tmp_path, TASK), write_own(tmp_path, LOSS)
    reward = write_own(tmp_path, "def score(response, answer): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    args = [
        "--task",
        f"{task.name}:Double",
        "--algo",
        f"./{loss.name}:loss",
        "--algo-args",
        "clip=0.3",
    ]
    config = parse_config(
        [*args, "--task-args", "factor=3", "--reward", f"{reward.name}:score*0.5"]
    )
    assert (config.task, config.algo) == (f"{task}:Double", f"{loss}:loss")
    assert config.reward == (f"{reward}:score*0.5",) and not config.is_multi_turn
    assert Config.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_a_class_of_gymnasium_is_an_environment_of_several_turns(tmp_path):
    path = write_own(tmp_path, ENVIRONMENT)
    config = parse_config(["--task", f"{path}:Echo"])
    assert config.task == f"environment:{path}:Echo" and config.is_multi_turn
    assert parse_config(["--task", config.task]) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("def loss(inputs, *,", "def loss(*,"),
            "its first parameter must be the inputs (algos.LossInputs)",
        ),
        (("clip: float = 0.2", "clip: float"), "and all others need defaults"),
        (
            ("def loss(", "loss = 3\ndef other("),
            "TypeError: it is a int; give a function loss(inputs, *, NAME=VALUE)",
        ),
        (
            ("cut * inputs.advantages), {", "cut * inputs.advantages).mean(), {"),
            "per_token_loss is [] for N = 6 tokens",
        ),
        (
            ('{"ratio": ratio.detach()}', "{'ratio': [1, 2]}"),
            "ratio is list for N = 6 tokens; give a tensor [N]",
        ),
        ((', {"ratio": ratio.detach()}', ""), "give (per_token_loss [N], stats: dict of [N])"),
        (
            ("inputs.logprobs - inputs.", "inputs.logprobs.detach() - inputs."),
            "per_token_loss carries no gradient",
        ),
        (
            ("inputs.behavior_logprobs", "inputs.old_logprobs"),
            "line 6: AttributeError: 'LossInputs' object has no",
        ),
        (("def loss(", "def lost("), "has no loss; it has lost; did you mean lost?"),
    ],
)
def test_a_loss_that_is_none_is_one_line_with_its_file(tmp_path, capsys, change, said):
    path = write_own(tmp_path, LOSS.replace(*change))
    line = refusal(capsys, "--algo", f"{path}:loss")
    assert said in line and path.name in line


def test_a_loss_that_couples_an_update_is_tried_with_one(tmp_path, capsys):
    coupled = LOSS.replace("def loss(inputs", "def loss(inputs, update", 1)
    coupled = coupled.replace("ratio = ", "update.advantages.mean()\n    ratio = ", 1)
    assert parse_config(["--algo", f"{write_own(tmp_path, coupled)}:loss"]).algo.endswith(":loss")
    unnamed = write_own(tmp_path, coupled.replace("inputs, update", "inputs, whole"))
    assert "its second may be `update`" in refusal(capsys, "--algo", f"{unnamed}:loss")


def test_arguments_of_a_loss_are_checked_against_its_signature(tmp_path, capsys):
    path = write_own(tmp_path, LOSS)
    assert f"--algo {path}:loss takes clip" in refusal(
        capsys, "--algo", f"{path}:loss", "--algo-args", "clop=1"
    )
    assert "must be a finite number" in refusal(
        capsys, "--algo", f"{path}:loss", "--algo-args", "clip=x"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--task", "nowhere.py:Task"), "there is no file"),
        (("--algo", "nowhere.py:loss"), "there is no file"),
        (("--reward", "nowhere.py:score"), "there is no file"),
        (("--optimizer", "nowhere.py:Optimizer"), "there is no file"),
        (
            ("--reward", "score"),
            "--reward must be FILE.py:FUNCTION or FILE.py:FUNCTION*WEIGHT, got 'score'",
        ),
        (
            ("--task", "jsonl"),
            "jsonl: missing a required argument: 'data_path'; give it as --data-path",
        ),
        (("--task-args", "words=1"), "--task-args words=1: --task addition takes none"),
        (
            ("--task-args", "words"),
            "--task-args must be NAME=VALUE, as in clip_high=0.28 or held_out=0.2, got 'words'",
        ),
        (
            ("--task", "frozen_lake", "--reward", "a.py:f"),
            "an environment, which gives its own rewards; change one",
        ),
    ],
)
def test_what_is_not_there_or_does_not_fit_is_one_line(capsys, args, said):
    assert said in refusal(capsys, *args)


def test_a_task_whose_score_takes_self_is_refused_unless_a_reward_takes_its_place(tmp_path, capsys):
    path = write_own(
        tmp_path, TASK.replace("    @staticmethod\n    def score(", "    def score(self, ")
    )
    reward = write_own(tmp_path, "def score(response, answer): return 1.0\n")
    assert "has no static method score" in refusal(capsys, "--task", f"{path}:Double")
    assert parse_config(["--task", f"{path}:Double", "--reward", f"{reward}:score"])


def test_help_for_a_loss_lists_its_keyword_arguments_with_defaults_and_ranges(tmp_path, capsys):
    path = write_own(tmp_path, LOSS)
    for algo, shown in (
        ("tis", "clip_low=0.0                at least 0 and at most 1"),
        ("grpo", "dual_clip=None              above 1 and at most 1,000,000,000"),
        ("dppo", "divergence=tv               tv or kl"),
        (f"{path}:loss", "  clip=0.2"),
    ):
        with pytest.raises(SystemExit) as exit_:
            parse_config(["--algo", algo, "--help"])
        assert exit_.value.code == 0 and shown in capsys.readouterr().out


def test_the_options_of_another_run_are_defaults_by_like(tmp_path):
    RunDirectory(
        Config(runs_dir=str(tmp_path), run_name="one", lr=0.5, algo_args=("clip_low=0.1",), steps=7)
    ).close()
    config = read_options(["--like", str(tmp_path / "one"), "--steps", "9"])
    assert (config.lr, config.algo_args, config.steps) == (0.5, ("clip_low=0.1",), 9)
    assert config.run_name is None, "its name is taken"
    with pytest.raises(ValueError, match=r"^--like .*: no run is there"):
        read_options(["--like", str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="--like does not go with --resume"):
        read_options(["--like", str(tmp_path / "one"), "--resume", str(tmp_path / "one")])


# Records and resuming


@pytest.fixture
def own_run(tmp_path):
    """A run with a task and a loss of the user's own, one of which has a sibling."""
    sibling = write_own(tmp_path / "mine", "x = 1\n")
    loss = write_own(tmp_path / "mine", f"import {sibling.stem}\n{LOSS}")
    task = write_own(tmp_path / "mine", TASK)
    config = read_options(
        ["--task", f"{task}:Double", "--algo", f"{loss}:loss", "--runs-dir", str(tmp_path / "runs")]
    )
    directory = RunDirectory(config)
    directory.close()
    return directory.path, config, [loss, sibling, task]


def test_a_run_keeps_copies_of_user_code_and_loads_them(own_run):
    run, config, files = own_run
    assert {path.name: path.read_text() for path in (run / "code").iterdir()} == {
        f.name: f.read_text() for f in files
    }
    assert f"{files[2].stem}-Double-{files[0].stem}-loss-a1-s0" in run.name
    node = RunDirectory(replace(config, run_name="other"), node_folder="other/node_1")
    assert (
        node.config.algo == own.located(config, node.path / "code").algo
        and (node.path / "code").is_dir()
    )
    assert not (RunDirectory(Config(runs_dir=str(run.parent))).path / "code").exists()


@pytest.mark.parametrize("change", ["none", "changed", "gone"])
def test_a_resumed_run_loads_its_copies_whatever_happened_to_the_files(own_run, change):
    run, config, (loss, sibling, task) = own_run
    if change != "none":
        for path in (loss, sibling, task):
            path.unlink() if change == "gone" else path.write_text("x = (\n")
    resumed = read_options(["--resume", str(run), "--algo", config.algo])
    assert resumed == read_options(["--resume", str(run)])
    assert own.texts_of(resumed) == own.texts_of(own.located(config, run / "code"))
    assert own.load(resumed.algo).__code__.co_filename == str(run / "code" / loss.name)
    with pytest.raises(
        ValueError, match=r"code/another.py:loss cannot change when a run is resumed"
    ):
        read_options(["--resume", str(run), "--algo", "another.py:loss"])


def test_nodes_with_other_files_of_the_users_are_refused_by_name(own_run):
    _, config, (loss, *_) = own_run
    mine = fingerprint(config)
    loss.write_text(LOSS + "\n")
    with pytest.raises(
        ValueError, match=rf"{loss} \w+ instead of \w+; .*start all nodes from one commit"
    ):
        check_same({"node 0": mine, "node 1": fingerprint(config)})


def test_a_run_that_was_moved_goes_on_with_its_copies(own_run, tmp_path):
    run, _, (loss, *_) = own_run
    moved = shutil.move(run, tmp_path / "elsewhere")
    shutil.rmtree(loss.parent)
    assert (
        Path(read_options(["--resume", str(moved)]).algo.rpartition(":")[0]).parent
        == tmp_path / "elsewhere/code"
    )


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a11 b22 c33 d44 =", "has 9 tokens, --max-prompt-tokens is 4; raise it to at least 9"),
        ("What is 1 + 1?", "its tokenizer cannot encode 'What is 1 + 1?' of --task jsonl"),
    ],
)
def test_prompts_that_do_not_fit_are_said_before_anything_is_written_or_started(
    tmp_path, prompt, said
):
    rows = [{"prompt": text, "answer": "x"} for text in ("a12 =", "b13 =", "a14 =", prompt)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["--task", "jsonl", "--data-path", "rows.jsonl", "--max-prompt-tokens", "4"]
    command = [sys.executable, str(ROOT / "train_async.py"), *args]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr[-2000:]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
