"""Training for bench_parts.py: Policy.train_step against the least that a step on the same tokens can be."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from config import Config
from data.models import load_tokenizer, resolve_model
from data.tasks import load_task
from scripts.bench_work import NO_LEARNING, SAMPLES_PER_STEP, work_of
from trainer.batch import distribute
from trainer.packing import MicroBatch, TrainSequence, pack
from trainer.policy import load_policy


def make_sequences(config: Config, model_path: str, count: int = SAMPLES_PER_STEP) -> list[TrainSequence]:
    """The task's first problems with responses of the work's lengths: right answers, or any tokens where forced."""
    task, tokenizer, work = load_task(config.task, config.seed), load_tokenizer(model_path), None
    work = work_of(config.max_response_tokens)
    sequences = []
    for index in range(count):
        problem = task.train_problem(index // config.group_size)
        response = [*tokenizer.encode(problem.answer), tokenizer.eos_token_id]
        if work.forced:
            response = random.Random(index).choices(range(tokenizer.vocab_size), k=work.length(index))
        sequences.append(_sequence(task.encode_prompt(problem, tokenizer), response, index))
    return sequences


def _sequence(prompt: list[int], response: list[int], index: int) -> TrainSequence:
    """With an advantage of one sign or the other, and log-probs that are constant."""
    length = len(prompt) + len(response)
    mask = np.arange(length) >= len(prompt)
    return TrainSequence(
        tokens=np.array([*prompt, *response], dtype=np.int64),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        advantage=1.0 if index % 2 else -1.0,
        reward=float(index % 2),
    )


class PlainStep:
    """Forward, backward, clipping and AdamW on micro-batches that are packed already: no loss but −A·log p."""

    def __init__(self, config: Config, model_path: str):
        from transformers import AutoModelForCausalLM

        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)

    def step(self, batches: list[MicroBatch]) -> None:
        """One optimizer update."""
        tokens = sum(len(batch.targets) for batch in batches)
        for batch in batches:
            hidden = self.model.base_model(batch.input_ids, position_ids=batch.position_ids, use_cache=False)
            rows = hidden.last_hidden_state.flatten(0, 1).index_select(0, batch.sources)
            logprobs = self.model.lm_head(rows).log_softmax(dim=-1).gather(1, batch.targets[:, None]).squeeze(1)
            (-(logprobs * batch.advantages).sum() / tokens).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure_training(config: Config, steps: int, repeats: int) -> Iterator[tuple[float, float]]:
    """Tokens per second, prompts included, of train_step and of the plain step, in turn; the first round warms up.

    In an initialised process group of one rank.
    """
    config = replace(config, lr=NO_LEARNING)  # else the policy collapses on the same tokens, and steps take longer
    model_path = resolve_model(config.model, config.task)
    sequences = make_sequences(config, model_path)
    ((update,),) = distribute([sequences], 1, config.max_tokens_per_microbatch)
    batches = [pack(microbatch, one_row=False) for microbatch in update]
    policy, plain = load_policy(config, model_path, torch.device("cpu")), PlainStep(config, model_path)
    tokens = steps * sum(len(sequence.tokens) for sequence in sequences)
    for repeat in range(repeats + 1):
        seconds = {}
        for name, step in (("ours", lambda: policy.train_step([update], 0)), ("plain", lambda: plain.step(batches))):
            start = time.monotonic()
            for _ in range(steps):
                step()
            seconds[name] = time.monotonic() - start
        if repeat:
            yield tokens / seconds["ours"], tokens / seconds["plain"]
