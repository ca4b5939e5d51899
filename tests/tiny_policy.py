"""A tiny random Qwen3 with a tokenizer, random sequences, and a policy of one or several ranks."""

import math
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from tiny_families import SIZES, tiny_config, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.config import Config
from asyncrl.runlog.time_ledger import TimeLedger
from asyncrl.trainer.packing import TrainSequence
from asyncrl.trainer.policy import Policy, load_policy

VOCAB = SIZES["vocab_size"]
VERSION = 11
"""The newest version of random sequences: some of their tokens have no lag in its step."""


def save_tiny_model(path: str, tied: bool = True) -> str:
    """Write a random 2-layer Qwen3 (hidden 64, vocabulary 150) and a tokenizer to `path`."""
    torch.manual_seed(0)
    # far from uniform, so that an error in any token shows
    options = {"tie_word_embeddings": tied, "initializer_range": 0.2, "pad_token_id": None}
    config = tiny_config("qwen3", hidden_size=64, **options)
    Qwen3ForCausalLM(config).save_pretrained(path)
    words = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(path)
    return os.fspath(path)


def save_tiny_family(family: str, path: str, **options) -> str:
    """Write a tiny random model of a family, and a tokenizer, to a folder."""
    save_tiny_model(path)
    disable_progress_bar()
    tiny_model(tiny_config(family, **options)).save_pretrained(path)
    return path


def byte_tokenizer(*first: str, **options) -> PreTrainedTokenizerFast:
    """A tokenizer that knows every text, byte by byte, behind these first tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate([*first, *alphabet])}
    tokenizer = Tokenizer(models.BPE(words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def save_byte_llama(path: str) -> str:
    """Write a random Llama whose tokenizer knows every text, byte by byte, with a chat template."""
    torch.manual_seed(0)
    fast = byte_tokenizer("<eos>", eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    )
    fast.save_pretrained(path)
    config = tiny_config("llama", vocab_size=len(fast), eos_token_id=0, pad_token_id=None)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def save_base_qwen3(path: str) -> str:
    """Write a random Qwen3 with the ends of Qwen3-8B-Base: <|endoftext|> of a text, <|im_end|> of a message."""
    torch.manual_seed(0)
    fast = byte_tokenizer(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(path)
    sizes = {"vocab_size": len(fast), "max_position_embeddings": 4096}
    config = tiny_config("qwen3", eos_token_id=0, pad_token_id=None, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def make_sequence(
    rng: np.random.Generator,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    group_id: int = 0,
) -> TrainSequence:
    """A sequence with random off-policy log-probs, versions up to VERSION, a random advantage and a random reward."""
    length = len(tokens)
    behavior_logprobs = np.where(loss_mask, -5 + rng.normal(size=length) / 10, 0.0)
    policy_versions = np.where(loss_mask, rng.integers(0, VERSION + 1, length), -1)
    return TrainSequence(
        tokens,
        loss_mask,
        behavior_logprobs=behavior_logprobs.astype(np.float32),
        policy_versions=policy_versions.astype(np.int32),
        advantage=float(rng.normal()),
        reward=float(rng.random()),
        group_id=group_id,
        oldest_version=int(policy_versions[loss_mask].min()) if loss_mask.any() else None,
    )


def random_sequences(
    num: int, seed: int = 0, min_tokens: int = 4, max_tokens: int = 24
) -> list[TrainSequence]:
    """Sequences of random tokens with a prompt of 2 and a gap in the loss mask."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(num):
        length = int(rng.integers(min_tokens, max_tokens + 1))
        mask = np.arange(length) >= 2
        if length > 8:
            mask[5:7] = False
        sequences.append(make_sequence(rng, rng.integers(0, VOCAB, length), mask))
    return sequences


def grouped_sequences(
    num_groups: int, group_size: int, seed: int = 0, max_prompt: int = 12
) -> list[TrainSequence]:
    """Groups of random sequences that begin with a prompt of 1 to max_prompt tokens.

    In every other group two more untrained tokens, other ones in each member, come before the first trained token.
    """
    rng = np.random.default_rng(seed)
    sequences = []
    for group_id in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(1, max_prompt + 1))
        for _ in range(group_size):
            response = rng.integers(0, VOCAB, rng.integers(4, 25))
            tokens = np.concatenate([prompt, response])
            mask = np.arange(len(tokens)) >= len(prompt) + 2 * (group_id % 2)
            sequences.append(make_sequence(rng, tokens, mask, group_id))
    return sequences


def random_tree(
    num: int, seed: int = 0, vocabulary: int = 3, system: int = 4
) -> list[TrainSequence]:
    """Sequences that begin with `system` equal tokens and continue with up to 10 tokens of a small vocabulary.

    So they often begin alike beyond that, too; some repeat another one, or continue where it ended.

    What is trained differs from branch to branch, as do log-probs, versions and advantages, also of the same tokens.
    """
    rng = np.random.default_rng(seed)
    sequences: list[TrainSequence] = []
    for number in range(num):
        tokens = rng.integers(0, vocabulary, rng.integers(1, 11))
        before = np.full(system, 7)
        continues = sequences and rng.random() < 0.4
        if continues:
            before = sequences[rng.integers(len(sequences))].tokens
        repeats = continues and rng.random() < 0.4
        tokens = before.copy() if repeats else np.concatenate([before, tokens])
        mask = rng.random(len(tokens)) < 0.7
        mask[0] = False
        sequences.append(make_sequence(rng, tokens, mask, group_id=number // 3))
    return sequences


def with_top_tokens(sequences: list[TrainSequence], num_top: int) -> list[TrainSequence]:
    """The sequences, with random tokens as the likeliest in each place. Their probability is about half."""
    rng = np.random.default_rng(num_top)
    changed = []
    for sequence in sequences:
        length = len(sequence.tokens)
        ids = [rng.choice(VOCAB, num_top, replace=False) for _ in range(length)]
        logprobs = rng.normal(-math.log(2 * num_top), 0.3, (length, num_top))
        top_logprobs = np.minimum(logprobs, -math.log(num_top + 1))
        columns = {
            "top_ids": np.stack(ids).astype(np.int32),
            "top_logprobs": top_logprobs.astype(np.float32),
        }
        changed.append(replace(sequence, **columns))
    return changed


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


def make_config(model: str, **options) -> Config:
    """A wide clip of the loss and none of the gradient, and no prefix is shared.

    SGD does not amplify rounding, as AdamW's first steps do.
    """
    defaults = {"algo": "tis", "algo_args": ("clip_high=10",), "max_grad_norm": 1e9}
    defaults |= {"model": model, "optimizer": "sgd", "lr": 0.1, "share_prefix": "off"}
    if "algo" in options:
        defaults["algo_args"] = ()
    return Config(**defaults | options)


def load(config: Config, clock: TimeLedger | None = None) -> Policy:
    """The policy of config.model on the CPU; without a learning rate it has that of the tiny model."""
    config = replace(config, lr=config.lr or 1e-3)
    return load_policy(config, config.model, torch.device("cpu"), clock)


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Copies of all weights by name; collective."""
    return {name: tensor.clone() for name, tensor in policy.named_full_parameters()}


def assert_same_gradient(actual, expected, relative=1e-5):
    """Each parameter's error is small beside the largest entry of its gradient."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (actual[name] - gradient).abs().max().item()
        assert error <= relative * gradient.abs().max().item(), (name, error)


def error_of(function: Callable, *args) -> str:
    """Type and message of the error that a call must raise."""
    try:
        function(*args)
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{function} raised nothing")


def change_sharing(policy, **values):
    """Set attributes of what shares prefixes in a policy, if that is there."""
    for plugin in policy.plugins:
        if hasattr(plugin, "attention_of_trees"):
            vars(plugin).update(values)
