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
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from asyncrl.config import Config
from asyncrl.tasks import load_task, score_of
from asyncrl.trainer.optimizer import optimizer_arguments
from scripts.bench.peers import TABLES
from scripts.bench.peers_ours import ended
from scripts.bench.workloads import WORKLOADS, Workload

NUM_PROBLEMS = 4096
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
        tokens = trained_tokens(logs, self.samples)
        if tokens is not None:
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
    """Return the response tokens of one step in TRL's log, or None for its summary, which may repeat the last step."""
    if "train_runtime" in logs:
        return None
    mean = logs.get("completions/mean_length")
    return logs.get("batch/trained_tokens_per_step", mean and mean * samples)


def task_reward(completions: list, answer: list[str], task: list[str], **_) -> list[float]:
    """Return the reward of each completion, a text or a conversation of one message, by the task's own score."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [
        score_of(name)(right, text) for name, right, text in zip(task, answer, texts, strict=True)
    ]


def problems(config: Config, conversational: bool):
    """Return the task's own training problems, in their order, as texts that have the tokens of our prompts."""
    from datasets import Dataset

    task = load_task(config.task, config.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
    rows = []
    for index in range(NUM_PROBLEMS):
        problem = task.train_problem(index)
        text = tokenizer.decode(task.encode_prompt(problem, tokenizer))
        prompt = [{"role": "user", "content": text}] if conversational else text
        rows.append({"prompt": prompt, "answer": problem.answer, "task": config.task})
    return Dataset.from_list(rows)


def common_options(config: Config) -> dict:
    """Return what both modes share: the batch, the optimizer and dtypes as ours, and nothing that only costs time."""
    return {
        **TABLES["trl"]["common"],
        "output_dir": config.runs_dir, "max_steps": config.steps, "seed": config.seed,
        "per_device_train_batch_size": config.groups_per_step * config.group_size,
        "num_generations": config.group_size, "max_completion_length": config.max_response_tokens,
        "learning_rate": config.lr, "warmup_steps": config.optim.warmup, "max_grad_norm": config.max_grad_norm,
        "weight_decay": optimizer_arguments(config).get("weight_decay", 0.0),
        "bf16": config.dtype_on("cpu") == "bfloat16",
    }  # fmt: skip


def synchronous_trainer(workload: Workload, config: Config, recorder: Recorder):
    """Return a GRPOTrainer, which samples by transformers' generate."""
    from trl import GRPOConfig, GRPOTrainer

    from scripts.bench import peers_cpu

    trainer = GRPOTrainer(
        config.model,
        task_reward,
        args=GRPOConfig(**common_options(config), **TABLES["trl"]["generate"]),
        train_dataset=problems(config, conversational=False),
        callbacks=[recorder],
    )
    if workload.is_forced:
        peers_cpu.force_generate(trainer.model, workload, trainer.processing_class.eos_token_id)
    return trainer


def asynchronous_trainer(workload: Workload, config: Config, recorder: Recorder, url: str):
    """Return the asynchronous trainer, which samples by a vLLM server."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from scripts.bench import peers_cpu

    peers_cpu.use_no_gpu(varlen_attention)
    if workload.is_forced:
        peers_cpu.force_async()
    transfer = peers_cpu.ShmWeightTransfer(url)
    arguments = AsyncGRPOConfig(
        **common_options(config), **TABLES["trl"]["async"], vllm_server_base_url=url
    )
    trainer = AsyncGRPOTrainer(
        config.model,
        task_reward,
        args=arguments,
        train_dataset=problems(config, conversational=True),
        processing_class=plain_tokenizer(config.model),
        weight_transfer=transfer,
        callbacks=[recorder],
    )
    transfer.named_parameters = trainer.model.named_parameters
    return trainer


def plain_tokenizer(model: str):
    """Return the model's tokenizer with a chat template that adds nothing, and an answer that is all content."""
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
    """Return causal attention of S segments, as flash_attn_varlen_func: the last query of each sees all of its keys.

    Args: query [N, H, D], key and value [K, H, D]; starts [S + 1] int32. Returns [N, H, D].
    """
    lengths_q, lengths_k = starts_q.diff().tolist(), starts_k.diff().tolist()
    attended = []
    for segment in zip(
        query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True
    ):
        heads_first = [tensor.transpose(0, 1)[None] for tensor in segment]
        num_queries, num_keys = heads_first[0].shape[2], heads_first[1].shape[2]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        attended.append(
            scaled_dot_product_attention(
                *heads_first, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(attended)


@contextlib.contextmanager
def server(config: Config, out: Path) -> Iterator[str]:
    """A vLLM server; yields its address, and ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", config.dtype_on("cpu"),
        "--max-model-len", str(config.max_sequence_tokens), *TABLES["server"]["options"],
    ]  # fmt: skip
    environment = os.environ | TABLES["server"]["environment"]
    with (
        open(out / "server.log", "w") as log,
        Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def main(mode: str, workload: str, out: str, **options) -> None:
    """Train, and write steps.jsonl into the folder `out`. `mode`: generate or async."""
    work = WORKLOADS[workload]
    config = work.config(runs_dir=out, **options)
    recorder = Recorder(Path(out, "steps.jsonl"), config.groups_per_step * config.group_size)
    with contextlib.ExitStack() as stack:
        if mode == "async":
            url = stack.enter_context(server(config, Path(out)))
            trainer = asynchronous_trainer(work, config, recorder, url)
        else:
            trainer = synchronous_trainer(work, config, recorder)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Start(recorder))
        trainer.train()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
