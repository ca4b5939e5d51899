"""Which parts a node is made of."""

import datetime
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_families import LONG_PHI3, LONGROPE, tiny_config
from tiny_policy import VOCAB, save_tiny_family, save_tiny_model
from transformers import AutoConfig, AutoTokenizer, Qwen3Config
from user_files import TASK, write_jsonl, write_user_code

from asyncrl.cluster.cluster import Cluster, form_cluster
from asyncrl.cluster.placement import Placement, WorkerPlacement, place
from asyncrl.config import Config
from asyncrl.job import assemble
from asyncrl.job.assemble import start_node
from asyncrl.job.inputs import check_model, check_tokenizer, make_tickets
from asyncrl.job.node import Rank
from asyncrl.runlog.manifest import Checkpoint, NodeFacts
from asyncrl.tasks import load_task
from asyncrl.trainer.families import CPU_HEAD_SIZES, check_engine, longest_sequence
from asyncrl.weights.models import resolve_model


@pytest.mark.parametrize("replicate_prompts", [True, False])
def test_a_group_is_one_ticket_exactly_without_replication(replicate_prompts):
    config = Config(replicate_prompts=replicate_prompts, group_size=3)
    model_path = resolve_model(config.model, config.task)
    tickets = make_tickets(config, Cluster(), model_path, load_task(config)).for_group(0, 0, 0)
    assert [ticket.num_members for ticket in tickets] == ([1, 1, 1] if replicate_prompts else [3])


def fail_to_start(rank, folder):
    """A run without a whole checkpoint, and one that has made all its steps."""

    def find_finished(config, cluster):
        return SimpleNamespace(step=80)

    for find, end in ((assemble.find_checkpoint, ValueError), (find_finished, SystemExit)):
        assemble.find_checkpoint = find
        with pytest.raises(end), assemble.start_rank(Config(resume=folder)):
            pass
        assert not dist.is_initialized()
        assert psutil.Process().children() == []


def test_a_start_that_fails_leaves_no_process_and_no_group(tmp_path):
    assert run_ranks(fail_to_start, 1, str(tmp_path)) == [0]


GROWS, IS_CUT = "expandable_segments:True", "expandable_segments:False"


@pytest.mark.parametrize(
    ("transport", "share", "given", "calls"),
    [
        ("nccl", None, {}, [GROWS, "cuda:1"]),
        ("shm", 0.4, {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, [f"{GROWS},a:1", "cuda:1", "0.50"]),
        # of two values of an option torch takes the last
        ("nccl", None, {"PYTORCH_ALLOC_CONF": IS_CUT}, [f"{GROWS},{IS_CUT}", "cuda:1"]),
        ("ipc", 0.4, {"PYTORCH_ALLOC_CONF": GROWS}, [f"{GROWS},{IS_CUT}", "cuda:1", "0.50"]),
    ],
)
def test_segments_grow_unless_an_engine_opens_them_and_never_into_its_part_of_the_gpu(
    monkeypatch, transport, share, given, calls
):
    """A trainer's context, too, is a part of the GPU: here a tenth."""
    made, gpu = [], SimpleNamespace(total_memory=12 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    for variable, options in given.items():
        monkeypatch.setenv(variable, options)
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", made.append)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: made.append(str(device)))
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda part: made.append(f"{part:.2f}")
    )
    worker = WorkerPlacement(0, 1, None if share is None else 0, 1, share or 0.9)
    placement = Placement((1,), 1, (worker,), transport)
    rank = SimpleNamespace(config=Config(), device=torch.device("cuda", 1), placement=placement)
    Rank.use_device(rank)
    assert made == calls


@pytest.mark.parametrize(
    ("family", "changes", "device", "dtype", "line"),
    [
        ("qwen3_next", {}, "cpu", "auto", r"is a qwen3_next, of which .*; add --dtype bfloat16$"),
        ("qwen3_next", {}, "cpu", "bfloat16", None),
        ("qwen3_next", {}, "cuda", "auto", None),
        ("llama", {"head_dim": 16}, "cpu", "auto", r"with attention heads of 16, .* for 32, 64, "),
        ("llama", {"head_dim": 16}, "cuda", "auto", None),
        ("llama", {"head_dim": 80}, "cpu", "auto", None),
        ("gpt2", {"n_head": 8, "n_embd": 64}, "cpu", "auto", r"heads of 8, .*or a GPU$"),
    ],
)
def test_a_model_that_vllm_cannot_compute_on_a_device_is_refused_before_a_worker_starts(
    family, changes, device, dtype, line, tmp_path
):
    model = AutoConfig.for_model(family, **changes)
    if line is None:
        check_engine(Config(dtype=dtype), model, device)
        return
    with pytest.raises(ValueError, match=line):
        check_engine(Config(dtype=dtype), model, device)


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("", None),
        ("raise ImportError('not installed')", "not installed"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "operator .* not exist"),
    ],
)
def test_a_model_that_needs_torchvision_is_refused_without_a_sound_one(
    module, error, tmp_path, monkeypatch
):
    (tmp_path / "torchvision.py").write_text(module)
    model = AutoConfig.for_model("qwen3_5_text")
    config = Config(dtype="bfloat16")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    if error is None:
        check_engine(config, model, "cuda")
        monkeypatch.delitem(sys.modules, "torchvision")
        return
    with pytest.raises(ValueError, match=rf"without torchvision \({error}\); docs/devices.md"):
        check_engine(config, model, "cuda")


def test_more_likeliest_tokens_than_the_vocabulary_has_are_refused(model):
    check_model(Config(top_logprobs=VOCAB), model, "cpu")
    line = rf"^--top-logprobs {VOCAB + 1} must be at most .*, {VOCAB}; lower it$"
    with pytest.raises(ValueError, match=line):
        check_model(Config(top_logprobs=VOCAB + 1), model, "cpu")


def test_sizes_of_heads_are_those_of_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.parametrize(
    ("family", "options", "limit"),
    [
        ("qwen3", {}, 512),
        ("phi3", LONG_PHI3, 24),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": LONGROPE,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            24,
        ),
    ],
)
def test_a_sequence_is_no_longer_than_trainer_and_engine_compute_alike(family, options, limit):
    """With longrope, a longer sequence of a micro-batch would change the shorter ones."""
    assert longest_sequence(tiny_config(family, **options)) == limit


def test_a_longer_sequence_is_refused(tmp_path):
    path = save_tiny_family("phi3", str(tmp_path), **LONG_PHI3)
    fitting = Config(model=path, max_prompt_tokens=4, max_response_tokens=20)
    check_model(fitting, path, "cpu")
    line = r"4 \+ --max-response-tokens 21 = 25 tokens, and a sequence of .* may have 24: .*; both have defaults$"
    with pytest.raises(ValueError, match=line):
        check_model(replace(fitting, max_response_tokens=21), path, "cpu")


@pytest.mark.parametrize(
    ("template", "vocab_size", "refused"),
    [
        ("{{ messages }}", VOCAB, None),
        ("{{ messages }}<image>", VOCAB, ("<image>", VOCAB)),
        (None, VOCAB - 1, ("t149", VOCAB - 1)),
    ],
)
def test_a_model_that_lacks_a_token_of_its_tokenizer_is_refused_unless_it_is_never_written(
    template, vocab_size, refused, tmp_path
):
    """A special token is written by a chat template alone."""
    path = save_tiny_model(str(tmp_path))
    Qwen3Config.from_pretrained(path, vocab_size=vocab_size).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"pad_token": "<image>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    if refused is None:
        check_tokenizer(Config(model=path), path)
        return
    token, index = refused
    line = f"its tokenizer writes '{token}' as {index}, and its config.json has a vocabulary of {vocab_size}; "
    with pytest.raises(ValueError, match=line):
        check_tokenizer(Config(model=path), path)


def rows_with(row, number=630):
    """700 rows that fit the tiny model of the task, with another one among them."""
    rows = [{"prompt": f"a{i % 90:02d} b{i // 90:02d} =", "answer": "x"} for i in range(700)]
    return [*rows[:number], row, *rows[number:]]


def start_on_rows(tmp_path, rows, resumed=None, **options):
    """What a leader ends with on these rows, before it writes or starts anything."""
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    config = Config(
        task="jsonl", data_path=str(path), runs_dir=str(tmp_path / "runs"), resume="RUN", **options
    )
    with ExitStack() as on_end, pytest.raises(ValueError) as caught:
        surroundings = place(config, 0, 2, 1), torch.device("cpu"), None, on_end, None, resumed
        with start_node(Rank(config, Cluster(), *surroundings), worker_main=None):
            pass
    assert not (tmp_path / "runs").exists()
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("row", "options", "line"),
    [
        (
            {"prompt": "a11 b22 c33 d44 =", "answer": "x"},
            {"max_prompt_tokens": 5},
            ": the prompt 'a11 b22 c33 d44 =' has 9 tokens, --max-prompt-tokens is 5 (1 of 701 prompts are too long)",
        ),
        (
            {"prompt": "a11 \u00fc =", "answer": "x"},
            {},
            ": --model tiny: its tokenizer or chat template refuses 'a11 \u00fc =' of --task jsonl (WordLevel error",
        ),
        # These are found before there is a model.
        (
            {"prompt": "a11 =", "response": "x"},
            {"model": "/nowhere"},
            ": a row without --reward needs the column answer",
        ),
        (
            {"question": "a11 =", "answer": "x"},
            {"model": "/nowhere"},
            " has no column prompt; ",
        ),
        (
            {"prompt": "a11 =", "answer": "x", "note": "\ud83d"},
            {"model": "/nowhere"},
            ': \'1 =", "answer": "x", "note": "\\ud83d\' ends with half of a character',
        ),
    ],
)
def test_any_row_that_cannot_be_used_ends_a_run_before_anything_is_written_or_started(
    row, options, line, tmp_path
):
    assert start_on_rows(tmp_path, rows_with(row), **options).startswith(f"FILE, row 630{line}")


@pytest.mark.parametrize("where", ["prompt", "system"])
def test_a_token_beyond_the_models_vocabulary_is_refused_where_a_prompt_has_it(where, tmp_path):
    model = save_tiny_model(str(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>"], "eos_token": "t149"})
    tokenizer.save_pretrained(model)
    rows = [{"prompt": f"t{i}", "answer": "x"} for i in range(20)]
    task_args = ()
    if where == "prompt":
        rows[7]["prompt"] = "t1 <answer>"
    else:
        task_args = ("system=<answer>",)
    options = {"max_prompt_tokens": 16, "max_response_tokens": 16, "task_args": task_args}
    line = start_on_rows(tmp_path, rows, model=model, **options)
    place = "FILE, row 7: the prompt 't1 <answer>'" if where == "prompt" else "FILE, row "
    assert line.startswith(place) and line.endswith(
        f"has the token {VOCAB}, and the model's config.json has a vocabulary of {VOCAB}; resize its embeddings, "
        "or remove the text of that token"
    )


def test_a_resumed_run_takes_the_rows_that_it_began_with_from_anywhere_and_no_others(tmp_path):
    rows = [{"prompt": f"a{i:02d} =", "answer": "x"} for i in range(40)]
    config = Config(task="jsonl", data_path=str(write_jsonl(tmp_path / "begun.jsonl", rows)))
    model_path = resolve_model(config.model, config.task)
    begun = make_tickets(config, Cluster(), model_path, load_task(config)).prompts.digest
    nodes = [NodeFacts({}, {}, begun)]
    resumed = Checkpoint(tmp_path, [], "id", 3, "a digest", nodes, [])
    changed = [rows[0] | {"answer": "y"}, *rows[1:]]
    for others in ([*rows, rows[0]], rows[::-1], changed, rows[1:]):
        line = start_on_rows(tmp_path, others, resumed)
        assert line == (
            "--resume RUN: the rows or problems of FILE have changed since it began; give the old ones (--data-path "
            "may name another place), or begin a new run"
        )
    assert start_on_rows(tmp_path, rows, resumed).startswith("--resume RUN: the weights in ")


LIMIT_S = 3.0
"""Longest wait in a collective, and less than the download of a model takes, seconds."""


def wait_for_a_download(rank: int, folder: str, nodes: list[int]) -> None:
    """Start a rank of these nodes whose leaders need longer for the model than a collective may last."""

    def resolve_model(model, task):
        time.sleep(LIMIT_S * (1.5 + nodes[rank]) if nodes[rank] == nodes[-1] else 0)
        return folder

    def lead(rank, model_path, task, worker_main):
        run = SimpleNamespace(path=Path(folder))
        return SimpleNamespace(
            config=rank.config, model_path=model_path, run=run, use_device=lambda: None
        )

    assemble.resolve_model, assemble.lead = resolve_model, lead
    store = dist.FileStore(f"{folder}/store", len(nodes))
    limit = datetime.timedelta(seconds=LIMIT_S)
    cluster = form_cluster((nodes[rank], "a host", {}), rank, len(nodes), store, "gloo", limit)
    surroundings = (None, torch.device("cpu"), None, ExitStack(), None, None)
    with start_node(Rank(Config(), cluster, *surroundings), None) as started:
        assert started.model_path == folder
        assert cluster.gather(0) == [0] * (cluster.num_nodes if cluster.is_leader else 1)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "nodes", [pytest.param([0, 0], marks=pytest.mark.slow), [0, 1]], ids=["one node", "two nodes"]
)
def test_ranks_wait_for_a_download_however_long_it_takes(nodes, tmp_path):
    (tmp_path / "stacks.txt").touch()
    assert run_ranks(wait_for_a_download, len(nodes), str(tmp_path), nodes) == [0] * len(nodes)


READS = "open(__file__.replace('.py', '.txt'))\n"
"""A line that reads a file beside the one that it is in."""


@pytest.mark.parametrize(
    ("source", "option"),
    [
        (f"{READS}def score(response): return 1.0\n", "reward"),
        (TASK.replace("words, data_path\n", f"words, data_path\n        {READS}"), "task"),
        (
            TASK.replace("return self._problem(2 *", f"{READS}        return self._problem(2 *"),
            "task",
        ),
    ],
    ids=["at import", "when made", "when asked"],
)
def test_user_code_whose_copies_lack_what_it_reads_ends_a_run_before_a_worker_starts(
    source, option, tmp_path
):
    path = write_user_code(tmp_path, source)
    path.with_suffix(".txt").write_text("")
    value = (f"{path}:score",) if option == "reward" else f"{path}:Double"
    task_args = ("words=a{} b{} =",) if option == "task" else ()
    config = Config(**{option: value}, task_args=task_args, runs_dir=str(tmp_path / "runs"))
    line = f"--{option} .*/code/{path.stem}.py:.*FileNotFoundError: .*; a run loads copies of user code, "
    with ExitStack() as on_end, pytest.raises(ValueError, match=line):
        surroundings = place(config, 0, 2, 1), torch.device("cpu"), None, on_end, None, None
        with start_node(Rank(config, Cluster(), *surroundings), worker_main=None):
            pass
