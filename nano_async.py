"""Asynchronous RL of a language model: the whole idea in one file.

    .venv/bin/python nano_async.py      # without a GPU: a tiny model learns addition in two minutes
    .venv/bin/python nano_async.py --async-ratio 0 --publish-delay 4    # from step 5 on, tokens are exactly 4 steps old
    .venv/bin/torchrun --nproc-per-node 2 nano_async.py --workers 2 --model Qwen/Qwen3-0.6B --task gsm8k --lr 2e-6 \
        --max-context 1536 --microbatch 8    # GPUs 0 and 1 train, 2 and 3 sample

1. Workers sample with vLLM while the trainer makes its steps. The trainer waits for its batch and for evaluations.
   Workers wait only at the limit of 3.
2. A token carries its version: the number of steps in the weights that sampled it. It carries its log-prob, too. The
   loss divides by that probability, so it sees how far the policy has moved since.
3. Groups of responses are numbered. With B groups a step, the step from version v trains on groups v * B to
   (v + 1) * B - 1. With `--async-ratio A`, the groups below v * B + floor((1 + A) * B) may start at version v. So a
   group starts at most ceil(A) versions before its batch. `--publish-delay K` sends the weights of version v at version
   v + K. Together, no token is older than ceil(A) + K steps.
4. New weights reach a worker between two tokens. A response that is half done continues under them, and keeps the keys
   and values of its earlier tokens.

Run it in this folder, and read it from top to bottom. Weights travel through shared memory: /dev/shm must hold K + 2
copies. train_async.py sends them by CUDA IPC or NCCL. This file saves no checkpoint and replaces no dead worker.
"""

import os

os.environ |= {  # read by libraries as they are imported, here and in the workers
    "OMP_NUM_THREADS": str(max(1, os.cpu_count() // 4)),
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "TQDM_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import json
import math
import queue
import threading
import time
import zlib
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from algos import ADVANTAGES, LossInputs, make_loss
from algos.inputs import couples_tokens, gathered
from data import make_task

mp.set_sharing_strategy("file_system")  # else each weight takes one of a process's 1,024 open files
RANK, NUM_RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
NUM_GPUS = torch.cuda.device_count()
DEVICE = torch.device("cuda", RANK) if NUM_GPUS else torch.device("cpu")
DTYPE = torch.bfloat16 if NUM_GPUS else torch.float32
NUM_HELD_OUT = 128  # problems of an evaluation, if the task has as many


@dataclass
class Options:
    model: str = "data/tiny/addition"  # folder or Hugging Face name
    task: str = "addition"  # a task of data/
    data_path: str | None = None  # rows of the task, if it has rows
    algo: str = "grpo"  # a loss of algos/
    algo_args: tuple[str, ...] = ()  # arguments of the loss, NAME=VALUE each
    async_ratio: Annotated[float, tyro.conf.arg(aliases=["--alpha"])] = 1.0  # A, batches ahead
    publish_delay: int = 0  # K, steps that weights are late
    steps: int = 60  # steps of training
    groups_per_step: int = 32  # B: prompts in a step
    group_size: int = 8  # G: responses to a prompt
    lr: float = 1e-3  # of AdamW; 4e-5 suits a model of 0.1 B parameters, 1e-6 one above 1 B
    max_context: int = 96  # tokens of a prompt with its response
    microbatch: int = 64  # responses in a forward pass
    workers: int = 1
    seed: int = 0
    log_file: str = os.devnull  # JSON lines, which scripts/table.py reads


@dataclass
class Sample:
    """A response of R tokens."""

    group: int  # negative for a held-out problem
    prompt: list[int]
    answer: str
    tokens: list[int] = field(default_factory=list)  # [R]
    logprobs: list[float] = field(default_factory=list)  # [R] nats, by the engine
    versions: list[int] = field(default_factory=list)  # [R]
    reward: float = 0.0
    advantage: float = 0.0


def train(options: Options, loss, rollout: "Rollout | None", log):
    """Run the loop of one rank. Only rank 0 has a rollout."""
    model = load_model(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    weights = gather_weights(model)
    if rollout:
        rollout.publish(0, weights)
        metrics = rollout.evaluate()
    for step in range(1, options.steps + 1):
        start = time.monotonic()
        received = [rollout.take_batch(step - 1) if rollout else None]
        dist.broadcast_object_list(received, src=0, device=torch.device("cpu"))
        batch = received[0]
        add_gradients(model, loss, batch, step - 1, options.microbatch)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).full_tensor()
        require(norm.isfinite(), "the gradient is not finite")  # before it spoils the weights
        optimizer.step()
        optimizer.zero_grad()
        weights = gather_weights(model)
        if rollout:
            rollout.publish(step, weights)
            metrics |= {"grad_norm": norm.item(), "time/step_s": time.monotonic() - start}
            if step % 10 == 0 or step == options.steps:
                metrics |= rollout.evaluate()
            report(step, batch, metrics, log)
            metrics = {}


class Rollout:
    """The trainer's side of rollout: which groups may start, and which have come back."""

    def __init__(self, options: Options, pipes: list, num_held_out: int):
        self.options = options
        self.num_held_out = num_held_out
        self.pipes = pipes
        self.held_back = []  # versions and weights that are not sent yet
        self.sent_version = 0
        self.num_started = 0  # groups, and so the next number
        self.samples = defaultdict(list)  # responses that have arrived, by group
        self.arrived = queue.Queue()
        for pipe in pipes:
            threading.Thread(target=self.receive, args=[pipe]).start()  # ends with its worker

    def receive(self, pipe):
        """Receive at all times, because a full pipe would stop its worker."""
        try:
            while True:
                self.arrived.put(pipe.recv())
        except (EOFError, OSError):
            self.arrived.put("a rollout worker was killed")

    def send(self, groups: range, size: int, weights=None):
        """Start groups of this size on the workers in turn, after the weights if there are new ones."""
        for index, pipe in enumerate(self.pipes):
            with suppress(OSError):  # a worker has ended, and `wait_for` says why
                pipe.send((self.sent_version, weights, groups[index :: len(self.pipes)], size))

    def publish(self, version: int, weights: list):
        """Send weights `publish_delay` versions late, and start the groups that may start at this version."""
        self.held_back.append((version, weights))
        due = None
        if version == 0 or len(self.held_back) > self.options.publish_delay:
            self.sent_version, due = self.held_back.pop(0)
        num_groups = self.options.groups_per_step
        num_ahead = int((1 + self.options.async_ratio) * num_groups)
        num_may_start = version * num_groups + num_ahead
        self.send(range(self.num_started, num_may_start), self.options.group_size, due)
        self.num_started = num_may_start

    def wait_for(self, groups: range, size: int) -> list[Sample]:
        """Return all responses of groups of this size, when the last of them has arrived."""
        while any(len(self.samples[group]) < size for group in groups):
            sample = self.arrived.get()
            require(isinstance(sample, Sample), sample)
            self.samples[sample.group].append(sample)
        return [sample for group in groups for sample in self.samples.pop(group)]

    def take_batch(self, version: int) -> list[Sample]:
        """Return the responses that the step from a version trains on."""
        num_groups = self.options.groups_per_step
        groups = range(version * num_groups, (version + 1) * num_groups)
        batch = self.wait_for(groups, self.options.group_size)
        staleness = version - min(min(sample.versions) for sample in batch)
        bound = math.ceil(self.options.async_ratio) + self.options.publish_delay
        require(staleness <= bound, f"a token is {staleness} steps old, and the bound is {bound}")
        return batch

    def evaluate(self) -> dict[str, float]:
        """Return the mean reward of held-out problems under the weights that were sent last."""
        groups = range(-self.num_held_out, 0)
        self.send(groups, size=1)
        rewards = [sample.reward for sample in self.wait_for(groups, size=1)]
        return {
            "eval/accuracy": sum(rewards) / len(rewards),
            "eval/policy_version": self.sent_version,
        }


def score_tokens(model, samples: list[Sample], version: int) -> LossInputs:
    """Return the N sampled tokens of some samples as a loss reads them. The model has this version."""
    texts = [torch.tensor(sample.prompt + sample.tokens) for sample in samples]
    masks = [torch.arange(len(text)) >= len(s.prompt) for text, s in zip(texts, samples)]
    tokens = pad_sequence(texts, batch_first=True).to(DEVICE)
    is_sampled = pad_sequence(masks, batch_first=True).to(DEVICE)[:, 1:]
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1][is_sampled].float()
    targets = tokens[:, 1:][is_sampled]
    logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    rows = [
        (logprob, sample.advantage, sample.reward, index, version - token_version)
        for index, sample in enumerate(samples)
        for logprob, token_version in zip(sample.logprobs, sample.versions)
    ]
    behavior, advantages, rewards, ids, lags = torch.tensor(rows, device=DEVICE).T
    proximal = logprobs.detach()  # the policy before the update; a step makes one update
    return LossInputs(logprobs, behavior, proximal, advantages, rewards, ids.long(), lags.long())


def add_gradients(model, loss, batch: list[Sample], version: int, microbatch: int):
    """Add the gradients of the mean loss of all tokens in a batch. The ranks share the samples."""
    rewards = torch.tensor([sample.reward for sample in batch])
    advantages = ADVANTAGES["grpo"](rewards, torch.tensor([sample.group for sample in batch]))
    for sample, advantage in zip(batch, advantages.tolist()):
        sample.advantage = advantage
    share = batch[RANK::NUM_RANKS]
    parts = [share[i : i + microbatch] for i in range(0, len(share), microbatch)]
    arguments = {}
    if couples_tokens(loss):
        with torch.no_grad():
            scores = [score_tokens(model, part, version) for part in parts]
        arguments["update"] = gathered(scores)  # of all parts and ranks
    num_tokens = sum(len(sample.tokens) for sample in batch)
    for part in parts:
        token_losses, _ = loss(score_tokens(model, part, version), **arguments)
        (token_losses.sum() / num_tokens * NUM_RANKS).backward()  # FSDP averages over ranks


def load_model(name: str):
    """Return the model in float32, sharded over the ranks; it computes in DTYPE."""
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, trust_remote_code=False
    ).to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32)
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:  # a layer
            fully_shard(module, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def gather_weights(model) -> list[tuple[str, torch.Tensor]]:
    """Return all weights in host memory that processes share, on rank 0. All ranks must call it."""
    weights = []
    for name, weight in model.named_parameters(remove_duplicate=False):
        full = weight.full_tensor().detach()
        if RANK == 0:
            weights.append((name, full.to("cpu", DTYPE, copy=True).share_memory_()))
    return weights


def report(step: int, batch: list[Sample], metrics: dict[str, float], log):
    """Print the metrics of a step, and write them to the log as JSON."""
    staleness = [step - 1 - min(sample.versions) for sample in batch]  # by the oldest token
    metrics = {
        "step": step,
        "samples": step * len(batch),
        "reward/mean": sum(sample.reward for sample in batch) / len(batch),
        "staleness/mean": sum(staleness) / len(batch),
        "staleness/max": max(staleness),
    } | metrics
    print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)
    print(json.dumps(metrics), file=log, flush=True)


def serve(pipe, options: Options, task, llm):
    """Sample what the trainer's messages ask for, and send complete responses back."""
    from vllm import SamplingParams

    running = {}  # unfinished responses, by the name of their request
    held_out = task.eval_problems(NUM_HELD_OUT)
    while True:
        while pipe.poll(0 if running else None):
            version, weights, groups, size = pipe.recv()
            if weights:  # they change between two tokens of each response
                llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            for group in groups:
                problem = held_out[group] if group < 0 else task.train_problem(group)
                prompt = task.encode_prompt(problem, llm.get_tokenizer())
                for member in range(size):
                    name = f"{options.seed}/{group}/{member}"
                    seed = zlib.crc32(name.encode())
                    parameters = SamplingParams(seed=seed, max_tokens=None, logprobs=0)
                    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
                    running[name] = Sample(group, prompt, problem.answer)
        for output in llm.llm_engine.step():
            sample = running[output.request_id]
            response = output.outputs[0]  # all of it so far
            sample.versions += [version] * (len(response.token_ids) - len(sample.versions))
            if output.finished:
                sample.tokens = list(response.token_ids)
                sample.logprobs = [
                    logprobs[token].logprob
                    for token, logprobs in zip(sample.tokens, response.logprobs)
                ]
                sample.reward = float(task.score(sample.answer, response.text))
                pipe.send(running.pop(output.request_id))


def start_engine(options: Options):
    """Return vLLM's engine with random weights."""
    from vllm import LLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return LLM(
        options.model,
        dtype=DTYPE,
        max_model_len=options.max_context,
        load_format="dummy",  # the trainer sends all weights
        hf_overrides={"tie_word_embeddings": False},  # it sends embedding and head apart
        enable_prefix_caching=False,  # it would keep keys and values of older weights
        async_scheduling=False,  # with it a step returns tokens of the step before
        distributed_executor_backend=UniProcExecutor,  # else a CPU gets one more process
        enable_chunked_prefill=NUM_GPUS > 0,  # on a CPU it fails with seeds
        enforce_eager=NUM_GPUS == 0,
        kv_cache_memory_bytes=None if NUM_GPUS else 1 << 30,
    )


def work(pipe, options: Options, task, index: int):
    """Run a worker. If it fails, its last message is the error as a text."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(NUM_GPUS)))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the engine has a store of its own
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[NUM_RANKS + index] if NUM_GPUS else ""
    try:
        serve(pipe, options, task, start_engine(options))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return  # the trainer has ended
    except Exception as error:
        pipe.send(f"a rollout worker failed: {error!r}")


def require(condition: bool, message: str):
    """End the run with one line and status 1, unless a condition holds."""
    if not condition:
        raise SystemExit(f"error: {message}")


def check(options: Options):
    """End the run if an option has a wrong value."""
    for name, value in vars(options).items():
        least = 0 if name in ("async_ratio", "publish_delay", "lr", "seed") else 1
        least += name == "group_size"  # an advantage compares responses
        if isinstance(value, int | float):
            message = f"--{name.replace('_', '-')} must be at least {least}, got {value}"
            require(least <= value < math.inf, message)
    fits = options.model == Options.model or options.lr != Options.lr
    require(fits, f"--lr {options.lr} is for the tiny model; choose one for {options.model}")
    num_samples = options.groups_per_step * options.group_size
    require(num_samples % NUM_RANKS == 0, f"{NUM_RANKS} ranks cannot share {num_samples} samples")
    num_needed = NUM_RANKS + options.workers if NUM_GPUS else 0
    require(num_needed <= NUM_GPUS, f"{num_needed} GPUs are needed, and {NUM_GPUS} are here")


def main(options: Options):
    """Check the options, start the workers, and train."""
    check(options)
    try:
        AutoConfig.from_pretrained(options.model, trust_remote_code=False)  # is it there?
        loss = make_loss(options.algo, options.algo_args)
        task = make_task(options.task, options.seed, options.data_path)
        log = open(options.log_file if RANK == 0 else os.devnull, "w")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(json.dumps({"config": vars(options)}), file=log)
    pipes = []
    if RANK == 0:
        print("starting the engines, for up to a minute", flush=True)
        for index in range(options.workers):
            ours, theirs = mp.Pipe()
            arguments = (theirs, options, task, index)
            mp.get_context("spawn").Process(target=work, args=arguments, daemon=True).start()
            theirs.close()
            pipes.append(ours)
    if NUM_GPUS:
        torch.cuda.set_device(DEVICE)
    store = dist.HashStore() if NUM_RANKS == 1 else None
    dist.init_process_group(store=store, rank=RANK, world_size=NUM_RANKS)
    rollout = Rollout(options, pipes, len(task.eval_problems(NUM_HELD_OUT))) if pipes else None
    try:
        train(options, loss, rollout, log)
    finally:
        for process in mp.active_children():
            process.terminate()  # because an engine takes seconds to end on its own
            process.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except (KeyboardInterrupt, OSError) as error:  # Ctrl-C, or a full disk
        raise SystemExit(f"error: {error!r}") from None
