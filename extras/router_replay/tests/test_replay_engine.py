"""The experts that a real engine returns are those of its log-probs: a trainer that replays them has the same ones."""

import numpy as np
import pytest
import torch
from engine_pair import PROMPT, sequence_of, start_pair
from tiny_policy import VOCAB, make_config, save_tiny_family

from asyncrl.trainer.sharding import free_gathered_weights

LONG_PROMPT = tuple(np.random.default_rng(0).integers(3, VOCAB, 300).tolist())
"""Two whole blocks of the prefix cache and a part of the third."""


FAMILIES = (
    "qwen3_moe",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "gpt_oss")),
)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    path = save_tiny_family(request.param, str(tmp_path_factory.mktemp(request.param)))
    config = make_config(path, router_replay=True, max_prompt_tokens=310)
    with start_pair(config, patches=[put_back_later]) as pair:
        yield pair


def put_back_later(patch):
    """Engines that other tests fork from this process are to have vLLM's own runner again."""
    from vllm.config import VllmConfig
    from vllm.v1.worker import cpu_worker

    changed = ((cpu_worker, "CPUModelRunner"), (VllmConfig, "_verify_aux_output_compatibility"))
    for owner, name in changed:
        patch.setattr(owner, name, getattr(owner, name))


def replayed(pair, prompt, response, experts):
    """[R] nats, the trainer's log-probs of a response with these experts, behind another sequence in its row."""
    short = sequence_of([3], [4, 5, 6], np.full((3, 2, 2), [0, 1], np.uint8))
    sequences = [sequence_of(prompt, response, experts), short]
    batch = pair.policy.pack_to_train(sequences, 0)
    with torch.no_grad():
        logprobs = pair.policy.forward(pair.policy.module, batch).logprobs
    free_gathered_weights(pair.policy.module)
    return logprobs[: len(response)].numpy()


def own_choice(pair, tokens):
    """[T, layers, k], sorted: the experts that the trainer's routers choose by themselves."""
    choices = []
    routers = [m for name, m in pair.policy.module.named_modules() if hasattr(m, "recorded")]
    hooks = [
        r.register_forward_hook(lambda m, i, output: choices.append(output[2])) for r in routers
    ]
    pair.trainer_logprobs(tokens[:1], tokens[1:])
    for hook in hooks:
        hook.remove()
    return torch.stack(choices, dim=1).sort(dim=-1).values.numpy()


def test_the_trainer_has_the_engines_log_probs_with_the_engines_experts_and_no_others(pair):
    """Also where the prompt comes from the prefix cache, which keeps the experts of its blocks."""
    for prompt in (PROMPT, LONG_PROMPT, LONG_PROMPT):
        completion = pair.generate("one", prompt)
        experts, response = completion.experts, completion.tokens
        assert experts.dtype == np.uint8
        assert experts.shape == (len(prompt) + len(response) - 1, 2, 2)
        logprobs = replayed(pair, prompt, response, experts)
        assert np.abs(logprobs - completion.behavior_logprobs).mean() < 1e-5
        other_experts = (experts + 1) % 4
        assert np.abs(replayed(pair, prompt, response, other_experts) - logprobs).mean() > 0.1


@pytest.mark.parametrize("on_update", ["keep", "resume"])
def test_of_an_interrupted_response_the_experts_are_those_of_the_keys_it_ended_with(
    pair, on_update
):
    """`keep` keeps the keys of each token's own weights; `resume` computes all again by the last version's."""
    num_tokens = pair.config.max_response_tokens
    with pair.options(on_update=on_update):
        completions, weights = pair.run_through_updates(
            lambda: [pair.proxy.generate(f"{i}", PROMPT, i, num_tokens) for i in range(24)]
        )
    is_other = []
    for completion in completions:
        versions = completion.policy_versions
        if versions[0] == versions[-1]:
            continue
        tokens = [*PROMPT, *completion.tokens]
        assert len(completion.experts) == len(tokens) - 1
        version, end = versions[-1], len(tokens) - 1
        if on_update == "keep":
            version, end = versions[0], len(PROMPT) + (versions == versions[0]).sum() - 1
        with pair.having(weights[version]):
            expected = own_choice(pair, tokens)[:end]
        is_other.append((np.sort(completion.experts[:end]) != expected).any(axis=-1))
    assert len(is_other) > 4
    # of all tokens, as rounding decides between equal logits now and then
    assert np.concatenate(is_other).mean() < 0.01
