"""One training run of TRL for peers.py; writes steps.jsonl.

Its one argument is what `main` takes, in JSON. Each mode has the fastest settings found for it that are correct: see
the top of peers.py.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from asyncrl.config import Config
from asyncrl.tasks import load_task, score_of
from asyncrl.trainer.optimizer import optimizer_arguments
from scripts.bench.peers_ours import ended
from scripts.bench.work import WORKS, Work

NUM_PROBLEMS = 4096
SEGMENTS_AT_ONCE = 64
"""Segments of similar length that one call of attention pads to the longest of them."""
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The asynchronous trainer takes conversations only; this one is the text as it is."""


@dataclass
class Recorder(TrainerCallback):
    """Writes a line per optimizer step of `samples`."""

    path: Path
    samples: int

    def on_step_end(self, *_, **__) -> None:
        """Stamp the step, before weights are published."""
        self._ended_at = time.time()

    def on_log(self, arguments, state, control, logs=None, **_) -> None:
        """Write the step's line."""
        if (tokens := trained_tokens(logs, self.samples)) is not None:
            self.write(ended(state.global_step, self._ended_at, tokens, self.samples))

    def write(self, line: dict) -> None:
        """Append a line."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class Start(TrainerCallback):
    """Writes when the engine was up, as step 0. The last callback: one of TRL's own waits for the server."""

    recorder: Recorder

    def on_train_begin(self, *_, **__) -> None:
        """Write the line."""
        self.recorder.write(ended(0, time.time()))


def trained_tokens(logs: dict, samples: int) -> float | None:
    """Response tokens of one step in TRL's log; the summary at the end, which may repeat the last step, has none."""
    if "train_runtime" in logs:
        return None
    if "batch/trained_tokens_per_step" in logs:
        return logs["batch/trained_tokens_per_step"]
    mean = logs.get("completions/mean_length")
    return None if mean is None else mean * samples


def task_reward(completions: list, answer: list[str], task: list[str], **_) -> list[float]:
    """Reward of each completion, a text or a conversation of one message, by the task's own score."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [
        score_of(name)(right, text) for name, right, text in zip(task, answer, texts, strict=True)
    ]


def problems(config: Config, conversational: bool) -> Dataset:
    """The task's own training problems, in their order, as texts that have the tokens of our prompts."""
    task = load_task(config.task, config.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
    rows = [task.train_problem(index) for index in range(NUM_PROBLEMS)]
    texts = [tokenizer.decode(task.encode_prompt(row, tokenizer)) for row in rows]
    prompts = [[{"role": "user", "content": text}] for text in texts] if conversational else texts
    answers = [row.answer for row in rows]
    return Dataset.from_dict(
        {"prompt": prompts, "answer": answers, "task": [config.task] * NUM_PROBLEMS}
    )


def common_options(config: Config) -> dict:
    """What both modes share: the batch, the optimizer and dtypes as ours, and nothing that only costs time."""
    return {
        "output_dir": config.runs_dir, "max_steps": config.steps, "seed": config.seed, "disable_tqdm": True,
        "per_device_train_batch_size": config.groups_per_step * config.group_size, "gradient_accumulation_steps": 1,
        "num_generations": config.group_size, "max_completion_length": config.max_response_tokens, "temperature": 1.0,
        "learning_rate": config.lr, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": config.optim.warmup,
        "weight_decay": optimizer_arguments(config).get("weight_decay", 0.0), "max_grad_norm": config.max_grad_norm,
        "epsilon": 0.2, "bf16": config.dtype_on("cpu") == "bfloat16", "gradient_checkpointing": False, "use_cpu": True,
        "dataloader_pin_memory": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
    }  # fmt: skip


def synchronous_trainer(work: Work, config: Config, recorder: Recorder):
    """GRPOTrainer, sampling by transformers' generate."""
    from trl import GRPOConfig, GRPOTrainer

    from scripts.bench import peers_cpu

    arguments = GRPOConfig(
        **common_options(config), beta=0.0, loss_type="dapo", shuffle_dataset=False
    )
    rows = problems(config, conversational=False)
    trainer = GRPOTrainer(
        config.model, task_reward, args=arguments, train_dataset=rows, callbacks=[recorder]
    )
    if work.forced:
        peers_cpu.force_generate(trainer.model, work, trainer.processing_class.eos_token_id)
    return trainer


def asynchronous_trainer(work: Work, config: Config, recorder: Recorder, url: str):
    """The asynchronous trainer, sampling by a vLLM server."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from scripts.bench import peers_cpu

    peers_cpu.use_no_gpu(varlen_attention)
    if work.forced:
        peers_cpu.force_async()
    transfer = peers_cpu.ShmWeightTransfer(url)
    arguments = AsyncGRPOConfig(
        **common_options(config), vllm_server_base_url=url, token_budget=-1, max_staleness=4, weight_sync_steps=1
    )  # fmt: skip
    rows, tokenizer = problems(config, conversational=True), plain_tokenizer(config.model)
    trainer = AsyncGRPOTrainer(
        config.model, task_reward, args=arguments, train_dataset=rows, processing_class=tokenizer,
        weight_transfer=transfer, callbacks=[recorder],
    )  # fmt: skip
    transfer.named_parameters = trainer.model.named_parameters
    return trainer


def plain_tokenizer(model: str):
    """The model's tokenizer with a chat template that adds nothing, and an answer that is all content."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {}}}
    return tokenizer


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    *_,
    softmax_scale: float,
    **__,
) -> Tensor:
    """Causal attention of S segments, as flash_attn_varlen_func: the last query of each sees all of its keys.

    Args: query [N, H, D], key and value [K, H, D]; starts [S + 1] int32. Returns [N, H, D].
    """
    lengths_q, lengths_k = starts_q.diff().long(), starts_k.diff().long()
    computed, positions = [], []
    for segments in lengths_k.argsort().split(SEGMENTS_AT_ONCE):
        rows, columns = _rows(starts_q, lengths_q, segments), _rows(starts_k, lengths_k, segments)
        behind = (lengths_k - lengths_q)[segments, None, None]
        seen = torch.arange(columns.shape[1]) <= torch.arange(rows.shape[1])[:, None] + behind
        padded = (t.transpose(1, 2) for t in (query[rows], key[columns], value[columns]))
        attended = scaled_dot_product_attention(
            *padded, attn_mask=seen[:, None], scale=softmax_scale, enable_gqa=True
        )
        valid = torch.arange(rows.shape[1]) < lengths_q[segments, None]
        computed.append(attended.transpose(1, 2)[valid])
        positions.append(rows[valid])
    return torch.cat(computed)[torch.cat(positions).argsort()]


def _rows(starts: Tensor, lengths: Tensor, segments: Tensor) -> Tensor:
    """Packed positions of some segments, [segments, longest]; past a segment's end its last position."""
    offsets = torch.arange(int(lengths[segments].max())).minimum(lengths[segments, None] - 1)
    return starts.long()[segments, None] + offsets


@contextlib.contextmanager
def server(config: Config, out: Path) -> Iterator[str]:
    """A vLLM server with the engine options of asyncrl/engine/vllm_setup.py; yields its address, and ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model,
        "--host", "127.0.0.1", "--port", str(port),
        "--dtype", config.dtype_on("cpu"), "--enforce-eager",
        "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192",
        "--no-enable-prefix-caching",  # a prefix would outlive the weights it was computed with
        "--max-model-len", str(config.max_sequence_tokens), "--max-num-seqs", "128",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--kv-cache-memory-bytes", str(1 << 30), "--disable-log-stats", "--disable-uvicorn-access-log",
        "--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        "--weight-transfer-config", '{"backend": "shm"}',
        "--worker-extension-cls", "asyncrl.engine.extension.EngineExtension",
    ]  # fmt: skip
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # with the endpoints that load weights
    with (
        open(out / "server.log", "w") as log,
        Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def main(mode: str, work: str, steps: int, out: str, **options) -> None:
    """Train, and write steps.jsonl into the folder `out`. `mode`: generate or async."""
    config = WORKS[work].config(steps=steps, runs_dir=out, **options)
    samples = config.groups_per_step * config.group_size
    made = (WORKS[work], config, Recorder(Path(out, "steps.jsonl"), samples))
    with server(config, Path(out)) if mode == "async" else contextlib.nullcontext() as url:
        trainer = asynchronous_trainer(*made, url) if url else synchronous_trainer(*made)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Start(made[2]))
        trainer.train()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
