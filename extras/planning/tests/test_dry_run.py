"""What a run would do on GPUs that are not here; above all: that every command of our pages fits the GPUs it names."""

import re
import shlex

import pytest
from qwen3_models import folder_of
from real_job import ROOT

from asyncrl.config import Config
from asyncrl.job.command_line import parse_config, read_options
from extras.planning.dry_run import dry_run

NAMED = "Qwen/Qwen3-8B-Base"
LONG = {"max_prompt_tokens": 512, "max_response_tokens": 2048}


def commands() -> list[str]:
    """Commands of our pages that train a named model, each on one line."""
    lines = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(r"^```\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
            parts = [line.partition("  # ")[0] for line in block.replace("\\\n", " ").splitlines()]
            lines += [line for line in parts if "train_async.py" in line and NAMED in line]
    return [line for line in lines if "…" not in line]


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    """vLLM, which other files start in this process, sets this variable of torchrun's and leaves it."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_every_command_of_our_pages_fits_machines_of_eight_h100(monkeypatch):
    assert len(commands()) >= 2
    for command in commands():
        check_command(command, monkeypatch)


def check_command(command, monkeypatch):
    torchrun, _, options = command.partition("train_async.py")
    given = dict(re.findall(r"--(nnodes|nproc-per-node) (\d+)", torchrun))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given["nproc-per-node"])
    config = read_options(shlex.split(options.replace(NAMED, folder_of("8b"))))
    lines = "\n".join(dry_run(config.checked(), f"{given.get('nnodes', 1)}x8xH100"))
    assert "warning" not in lines
    assert "so: --save-memory head --max-tokens-per-microbatch 4096" in lines
    assert re.search(
        r"^step: about [\d.]+ s; training [\d.]+, sampling [\d.]+, weights", lines, re.M
    )


def test_the_command_line_prints_the_plan_and_starts_nothing(capsys):
    words = ["--task", "gsm8k", *(f"--{name}={value}" for name, value in LONG.items())]
    with pytest.raises(SystemExit, match="0"):
        parse_config(["--model", folder_of("0.6b"), *words, "--dry-run", "--gpus", "1xH100"])
    text = capsys.readouterr().out
    assert text.startswith("dry run on 1 × 1 H100 SXM: nothing is started\nplacement (weights")
    assert "shared with trainer rank 0" in text and "one after the other" in text


def test_without_torchrun_the_fastest_split_is_taken_and_a_slower_one_is_told_of_it(monkeypatch):
    config = Config(model=folder_of("8b"), async_ratio=2, **LONG)
    best = "\n".join(dry_run(config, "8xH200"))
    assert "faster:" not in best
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    slow = "\n".join(dry_run(config, "8xH200"))
    faster = r"faster: --nproc-per-node (\d) and \d engines of \d GPUs: about ([\d.]+) s"
    ranks, step_s = re.search(faster, slow).groups()
    assert int(ranks) == best.count("trainer rank") - best.count("  trainer rank 0,")
    # The plan may choose engines of several GPUs, which the run has by --rollout-tp alone.
    predicted_s = float(re.search(r"step: about ([\d.]+) s", best)[1])
    assert predicted_s == pytest.approx(float(step_s), rel=0.1)


def test_several_machines_need_the_number_of_ranks():
    config = Config(model=folder_of("0.6b"), **LONG)
    with pytest.raises(ValueError, match="--gpus 2x1xH100: for several machines use torchrun"):
        list(dry_run(config, "2x1xH100"))
