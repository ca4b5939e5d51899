"""One training run of TRL for bench_peers.py, in the peers' own environment; writes steps.jsonl and snapshots.

Each mode has the fastest settings found for it that are correct; they are on top of bench_peers.py.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from data.rewards import score
from data.tasks import load_task
from scripts.bench_work import GROUP_SIZE, MAX_PROMPT_TOKENS, MODEL_TASK, SAMPLES_PER_STEP, WORKS, Work

ROOT = Path(__file__).resolve().parent.parent

MODES = ("generate", "colocate", "async")
NUM_PROBLEMS = 4096
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The asynchronous trainer takes conversations only; this one is the text as it is."""


class Recorder(TrainerCallback):
    """Writes a line per optimizer step, and the weights every `snapshot_every` steps."""

    def __init__(self, out: Path, snapshot_every: int):
        self.out, self.snapshot_every = out, snapshot_every
        self._file = open(out / "steps.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        self._ended_at = 0.0

    def on_step_end(self, arguments, state, control, model=None, **_) -> None:
        """Stamp the step, before weights are published."""
        self._ended_at = time.time()
        if self.snapshot_every and state.global_step % self.snapshot_every == 0:
            folder = self.out / "snapshots" / f"step_{state.global_step}"
            folder.mkdir(parents=True)
            save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / "model.safetensors")
            os.utime(folder / "model.safetensors", (self._ended_at, self._ended_at))

    def on_log(self, arguments, state, control, logs=None, **_) -> None:
        """Write the step's line; the summary at the end has no lengths."""
        if (tokens := trained_tokens(logs)) is None:
            return
        record = {"step": state.global_step, "time": self._ended_at, "samples": SAMPLES_PER_STEP, "tokens": tokens}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def trained_tokens(logs: dict) -> float | None:
    """Response tokens of one step in TRL's log."""
    if "batch/trained_tokens_per_step" in logs:
        return logs["batch/trained_tokens_per_step"]
    mean = logs.get("completions/mean_length")
    return None if mean is None else mean * SAMPLES_PER_STEP


def addition_reward(completions: list, answer: list[str], **_) -> list[float]:
    """Reward of each completion, a text or a conversation of one message, by the task's own score."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [score(MODEL_TASK, right, text) for right, text in zip(answer, texts, strict=True)]


def problems(conversational: bool) -> Dataset:
    """The task's own training problems, in their order."""
    task = load_task(MODEL_TASK, seed=0)
    rows = [task.train_problem(index) for index in range(NUM_PROBLEMS)]
    prompts = [[{"role": "user", "content": row.prompt}] if conversational else row.prompt for row in rows]
    return Dataset.from_dict({"prompt": prompts, "answer": [row.answer for row in rows]})


def common_options(work: Work, steps: int, out: Path) -> dict:
    """What all three modes share: the batch, the optimizer as ours, float32, and nothing that only costs time."""
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": SAMPLES_PER_STEP,
        "gradient_accumulation_steps": 1,
        "max_steps": steps,
        "num_generations": GROUP_SIZE,
        "max_completion_length": work.max_response_tokens,
        "temperature": 1.0,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "epsilon": 0.2,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def synchronous_trainer(mode: str, work: Work, model: str, options: dict, recorder: Recorder):
    """GRPOTrainer, sampling by transformers' generate or by vLLM in the same process."""
    from trl import GRPOConfig, GRPOTrainer

    from scripts import bench_peers_cpu

    if mode == "colocate":
        bench_peers_cpu.use_our_engine_options()
        options |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": MAX_PROMPT_TOKENS + work.max_response_tokens,
            "vllm_importance_sampling_correction": False,  # engine and trainer differ by 1e-6 nats here
        }
    arguments = GRPOConfig(**options, beta=0.0, loss_type="dapo", shuffle_dataset=False)
    trainer = GRPOTrainer(
        model, addition_reward, args=arguments, train_dataset=problems(conversational=False), callbacks=[recorder]
    )
    if work.forced and mode == "colocate":
        bench_peers_cpu.force_colocated(trainer.vllm_generation.llm, work)
    elif work.forced:
        bench_peers_cpu.force_generate(trainer.model, work, trainer.processing_class.eos_token_id)
    return trainer


def asynchronous_trainer(work: Work, model: str, options: dict, recorder: Recorder, url: str, max_staleness: int):
    """The asynchronous trainer, sampling by a vLLM server."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from scripts import bench_peers_cpu

    bench_peers_cpu.use_no_gpu()
    if work.forced:
        bench_peers_cpu.force_async()
    transfer = bench_peers_cpu.ShmWeightTransfer(url)
    arguments = AsyncGRPOConfig(
        **options, vllm_server_base_url=url, token_budget=-1, max_staleness=max_staleness, weight_sync_steps=1
    )
    trainer = AsyncGRPOTrainer(
        model,
        addition_reward,
        args=arguments,
        train_dataset=problems(conversational=True),
        processing_class=plain_tokenizer(model),
        callbacks=[recorder],
        weight_transfer=transfer,
    )
    transfer.named_parameters = trainer.model.named_parameters
    return trainer


def plain_tokenizer(model: str):
    """The model's tokenizer with a chat template that adds nothing, and an answer that is all content."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {}}}
    return tokenizer


@contextlib.contextmanager
def server(work: Work, model: str, out: Path) -> Iterator[str]:
    """A vLLM server with the same engine options as ours; yields its address, and ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open(out / "server.log", "w") as log:
        process = subprocess.Popen(server_command(work, model, port), stdout=log, stderr=log, env=server_environment())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def server_command(work: Work, model: str, port: int) -> list[str]:
    """vLLM's server with the engine options of engine/vllm_setup.py."""
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
        "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192",
        "--no-enable-prefix-caching",  # a prefix would outlive the weights it was computed with
        "--max-model-len", str(MAX_PROMPT_TOKENS + work.max_response_tokens), "--max-num-seqs", "128",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--kv-cache-memory-bytes", str(1 << 30), "--disable-log-stats", "--disable-uvicorn-access-log",
        "--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        "--weight-transfer-config", '{"backend": "shm"}',
        "--worker-extension-cls", "engine.extension.EngineExtension",
    ]  # fmt: skip


def server_environment() -> dict[str, str]:
    """Of the server: the endpoints that load weights, and where the extension is."""
    return {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--snapshot-every", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=4, help="of the asynchronous trainer")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    work, recorder = WORKS[given.work], Recorder(given.out, given.snapshot_every)
    options = common_options(work, given.steps, given.out)
    with contextlib.ExitStack() as stack:
        if given.mode == "async":
            url = stack.enter_context(server(work, given.model, given.out))
            trainer = asynchronous_trainer(work, given.model, options, recorder, url, given.max_staleness)
        else:
            trainer = synchronous_trainer(given.mode, work, given.model, options, recorder)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main()
