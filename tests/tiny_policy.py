"""A tiny random Qwen3 with a tokenizer, random sequences, and the body of a second rank, for packing and policy."""

import math
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.config import Config
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.checkpoint import save_weights
from asyncrl.trainer.packing import TrainSequence
from asyncrl.trainer.policy import Policy, load_policy

VOCAB = 150


def save_tiny_model(path: str, tied: bool = True) -> str:
    """Write a random 2-layer Qwen3 (hidden 64, vocabulary 150) and a tokenizer to `path`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # far from uniform, so that an error in any token shows
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    words = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(path)
    return os.fspath(path)


def save_byte_llama(path: str) -> str:
    """Write a random Llama whose tokenizer knows every text, byte by byte, with a chat template."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    )
    fast.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def save_unservable_model(path: str) -> str:
    """Write a model and tokenizer that the trainer loads and vLLM refuses: a head size that no kernel has."""
    save_tiny_model(path)
    config = Qwen3Config.from_pretrained(path, head_dim=20)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def random_sequences(
    num: int, seed: int = 0, min_tokens: int = 4, max_tokens: int = 24
) -> list[TrainSequence]:
    """Sequences of random tokens with a prompt of 2, a gap in the loss mask, and off-policy behavior log-probs."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(num):
        length = int(rng.integers(min_tokens, max_tokens + 1))
        mask = np.arange(length) >= 2
        if length > 8:
            mask[5:7] = False
        sequences.append(
            TrainSequence(
                tokens=rng.integers(0, VOCAB, length),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -5 + rng.normal(size=length) / 10, 0.0).astype(
                    np.float32
                ),
                policy_versions=np.where(mask, rng.integers(0, 12, length), -1).astype(np.int32),
                advantage=float(rng.normal()),
                reward=float(rng.random()),
            )
        )
    return sequences


def grouped_sequences(
    num_groups: int, group_size: int, seed: int = 0, max_prompt: int = 12
) -> list[TrainSequence]:
    """Groups of random sequences that begin with a prompt of 1 to max_prompt tokens and versions below 12.

    In every other group two more untrained tokens, other ones in each member, stand before the first trained token.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for group_id in range(num_groups):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, max_prompt + 1)))
        members = random_sequences(group_size, seed=seed + 1000 * group_id)
        groups += [
            _with_prompt(s, prompt, 2 if group_id % 2 == 0 else 0, group_id) for s in members
        ]
    return groups


def random_tree(
    num: int, seed: int = 0, vocabulary: int = 3, system: int = 4
) -> list[TrainSequence]:
    """Sequences that begin with `system` equal tokens and go on with up to 10 of few different ones.

    So they often begin alike beyond that, too; some repeat another one, or go on where it ended.

    What is trained differs from branch to branch, as do log-probs, versions and advantages, also of the same tokens.
    """
    rng = np.random.default_rng(seed)
    sequences: list[TrainSequence] = []
    for i in range(num):
        tokens, before = rng.integers(0, vocabulary, rng.integers(1, 11)), np.full(system, 7)
        if repeats := sequences and rng.random() < 0.4:
            before = sequences[rng.integers(len(sequences))].tokens
        tokens = (
            before.copy() if repeats and rng.random() < 0.4 else np.concatenate([before, tokens])
        )
        mask = rng.random(len(tokens)) < 0.7
        mask[0] = False
        behavior = np.where(mask, -5 + rng.normal(size=len(tokens)) / 10, 0.0).astype(np.float32)
        versions = np.where(mask, rng.integers(0, 12, len(tokens)), -1).astype(np.int32)
        sequences.append(
            TrainSequence(
                tokens, mask, behavior, versions, float(rng.normal()), rng.random(), i // 3
            )
        )
    return sequences


def _with_prompt(s: TrainSequence, prompt: np.ndarray, cut: int, group_id: int) -> TrainSequence:
    """The sequence without its first `cut` tokens, after a prompt."""
    untrained = np.zeros(len(prompt))
    return replace(
        s,
        tokens=np.concatenate([prompt, s.tokens[cut:]]),
        loss_mask=np.concatenate([untrained.astype(bool), s.loss_mask[cut:]]),
        behavior_logprobs=np.concatenate([untrained.astype(np.float32), s.behavior_logprobs[cut:]]),
        policy_versions=np.concatenate([untrained.astype(np.int32) - 1, s.policy_versions[cut:]]),
        group_id=group_id,
    )


def brute_force_nucleus(row, target, temperature, top_p, top_k=0, min_p=0.0):
    """Keep the likeliest top_k tokens that are min_p as likely as the first, until they hold top_p of what these have,
    and the sampled one; −inf elsewhere."""
    row = row / temperature
    kept, mass = {target}, 0.0
    probs = row.double().softmax(dim=-1)
    likeliest = sorted(range(len(row)), key=lambda i: -row[i].item())[: top_k or None]
    likeliest = [token for token in likeliest if probs[token] >= min_p * probs[likeliest[0]]]
    probs = probs / probs[likeliest].sum()
    for token in likeliest:
        if mass >= top_p:
            break
        kept.add(token)
        mass += probs[token].item()
    return torch.tensor([row[i].item() if i in kept else -math.inf for i in range(len(row))])


def load(config: Config, clock: TrainerClock | None = None) -> Policy:
    """The policy of config.model on the CPU."""
    return load_policy(config, config.model, torch.device("cpu"), clock)


def first_gradient(policy: Policy) -> dict[str, torch.Tensor]:
    """Full gradient of the first update by parameter name, read from AdamW's first moment: (1 − β1)·gradient."""
    beta1 = policy.optimizer.defaults["betas"][0]
    return {
        name: policy.optimizer.state[parameter]["exp_avg"].full_tensor() / (1 - beta1)
        for name, parameter in policy.module.model.named_parameters()
        if parameter.requires_grad
    }


def assert_same_gradient(actual, expected, relative=1e-5):
    """Each parameter's error is small beside the largest entry of its gradient."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (actual[name] - gradient).abs().max().item()
        assert error <= relative * gradient.abs().max().item(), (name, error)


def run_on_two_ranks(
    rank: int, folder: str, cases: list[tuple[Config, list[list[TrainSequence]], int]]
) -> None:
    """Body of a spawned rank: train one step per (config, updates, token budget), then save and fail in known ways.

    Rank 0 writes `results.pt`: the metrics and first gradient of each case, and the errors that each rank met.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results = []
    for config, updates, budget in cases:
        policy = load(config)
        metrics = policy.train_step(distribute(updates, 2, budget)[rank], policy_version=12)
        results.append((metrics, first_gradient(policy)))
    save_weights(policy, os.path.join(folder, "step_1"))
    mine = [error_of(save_weights, policy, os.path.join(folder, "step_1"))]
    broken = replace(updates[0][0], advantage=float("nan"))
    share = distribute([[broken, *updates[0]]], 2, cases[-1][2])[rank]
    mine.append(error_of(policy.train_step, share, 12))
    errors = [None, None]
    dist.all_gather_object(errors, mine)
    if rank == 0:
        torch.save({"results": results, "errors": errors}, os.path.join(folder, "results.pt"))
    dist.destroy_process_group()


def train_on_two_ranks(rank: int, folder: str, cases: dict[str, tuple[Config, int]]) -> None:
    """Body of a spawned rank: train one update per (config, rows per pass through the head), rank 0 writes `found.pt`.

    It holds the metrics and the first gradient of each case, for 5 groups of 3 sequences.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for name, (config, chunk_rows) in cases.items():
        policy = load(config)
        policy.module.chunk_rows = chunk_rows
        share = distribute([grouped_sequences(5, 3)], 2, 60, config.share_prefix)[rank]
        metrics = policy.train_step(share, policy_version=12)
        found[name] = (metrics, first_gradient(policy))
    if rank == 0:
        torch.save(found, os.path.join(folder, "found.pt"))
    dist.destroy_process_group()


def save_with_a_file_size_limit(_rank: int, model: str, path: str, error_path: str) -> None:
    """Body of a rank: save a checkpoint where no file may be longer than 100 kB, and write down the error."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = load(Config(model=model))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    error = error_of(save_weights, policy, path)
    with open(error_path, "w") as file:
        file.write(error)
    dist.destroy_process_group()


def error_of(function: Callable, *args) -> str:
    """Type and message of the error that a call must raise."""
    try:
        function(*args)
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{function} raised nothing")
