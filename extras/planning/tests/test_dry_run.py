"""What a run would do on GPUs that are not here; above all: that every command of our pages fits the GPUs it names."""

import re
import shlex
from pathlib import Path

import pytest
from real_job import ROOT

from asyncrl.config import Config
from asyncrl.job.command_line import parse_config, read_options
from extras.planning.dry_run import dry_run
from scripts.qwen3_shapes import qwen3_config

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = "Qwen/Qwen3-8B-Base"
LONG = ("--task", "gsm8k", "--max-prompt-tokens", "512", "--max-response-tokens", "2048")


def commands() -> list[str]:
    """Commands of our pages that train a named model, each on one line."""
    blocks = (
        re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        for page in PAGES
    )
    joined = [block.replace("\\\n", " ") for of_page in blocks for block in of_page]
    lines = [line.partition("  # ")[0] for block in joined for line in block.splitlines()]
    return [
        line for line in lines if "train_async.py" in line and NAMED in line and "…" not in line
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Folders with nothing but the config.json of Qwen3."""
    folders = {size: tmp_path_factory.mktemp(size) for size in ("0.6b", "8b")}
    for size, folder in folders.items():
        qwen3_config(size).save_pretrained(folder)
    return folders


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    """vLLM, which other files start in this process, sets this variable of torchrun's and leaves it."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_our_pages_have_commands_for_named_models():
    assert len(commands()) >= 2


@pytest.mark.parametrize("command", commands())
def test_every_command_of_our_pages_fits_machines_of_eight_h100(command, models, monkeypatch):
    torchrun, _, options = command.partition("train_async.py")
    given = dict(re.findall(r"--(nnodes|nproc-per-node) (\d+)", torchrun))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given["nproc-per-node"])
    config = read_options(
        [str(models["8b"]) if word == NAMED else word for word in shlex.split(options)]
    )
    lines = "\n".join(dry_run(config.checked(), f"{given.get('nnodes', 1)}x8xH100"))
    assert "warning" not in lines and "so: --save-memory --max-tokens-per-microbatch 2560" in lines
    assert re.search(
        r"^step: about [\d.]+ s; training [\d.]+, sampling [\d.]+, weights", lines, re.M
    )


def test_the_command_line_prints_the_plan_and_starts_nothing(models, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(["--model", str(models["0.6b"]), *LONG, "--dry-run", "--gpus", "1xH100"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(
        "dry run on 1 × 1 H100 SXM: nothing is started\nplacement (weights"
    )
    assert "shared with trainer rank 0" in said and "one after the other" in said


def test_without_torchrun_the_fastest_split_is_taken_and_a_slower_one_is_told_of_it(
    models, monkeypatch
):
    config = Config(
        model=str(models["8b"]), async_ratio=2, max_prompt_tokens=512, max_response_tokens=2048
    )
    best = "\n".join(dry_run(config, "8xH200"))
    assert "faster:" not in best
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    slow = "\n".join(dry_run(config, "8xH200"))
    fewer = re.search(
        r"faster: --nproc-per-node (\d) and (\d) engines of 2 GPUs: about ([\d.]+) s", slow
    )
    assert int(fewer[1]) == best.count("trainer rank") - best.count("  trainer rank 0,")
    # The plan may choose engines of several GPUs, which the run has by --rollout-tp alone.
    assert float(re.search(r"step: about ([\d.]+) s", best)[1]) == pytest.approx(
        float(fewer[3]), rel=0.1
    )
