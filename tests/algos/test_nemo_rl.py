"""The losses of NeMo RL, with their gradients: tests/unit/algorithms/data/clipped_pg_loss_goldens.json there.

Two sequences of 3 and 2 trained tokens. `next_token_logprobs` is the current policy there, `prev_logprobs` the proximal
one, `generation_logprobs` the one that sampled. Its ratio is current against proximal, so our losses of one ratio are
given the proximal policy as the one that sampled; what it multiplies by proximal against sampled is multiplied here.
Its mean is over tokens, that of GSPO over sequences.
"""

import math
from dataclasses import replace

import pytest
import torch
from loss_checks import random_inputs

from algos import LOSSES

SAMPLED = (-1.2, -1.5, -0.7, -1.4, -0.7)
PROXIMAL = (-1.0, -1.1, -0.8, -0.9, -1.0)
CURRENT = (-1.6, -0.8, -1.1, -0.7, -1.4)
STALE = [math.exp(proximal - sampled) for proximal, sampled in zip(PROXIMAL, SAMPLED, strict=True)]
STALE_SEQUENCES = [math.prod(STALE[:3])] * 3 + [math.prod(STALE[3:])] * 2
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
OF_TOKENS, OF_SEQUENCES = [1 / 5] * 5, [1 / 6] * 3 + [1 / 4] * 2
TRUNCATED = [-0.1608768107, 0.2456743025, -0.0536256036, 0.3493211881, -0.0595902363]


@pytest.mark.parametrize(
    ("algo", "options", "behavior", "weights", "loss", "slopes"),
    [
        pytest.param(
            "reinforce",
            {},
            PROXIMAL,
            OF_TOKENS,
            0.373999999252,
            [-0.2399999995, 0.1399999997, -0.0799999998, 0.2199999996, -0.1199999998],
            id="reinforce",
        ),
        pytest.param(
            "grpo",
            CLIP,
            PROXIMAL,
            OF_TOKENS,
            0.18627018364195694,
            [-0.1317147924, 0.1889802327, -0.0592654575, 0.2687086063, -0.0804384054],
            id="ppo_token",
        ),
        pytest.param(
            "grpo",
            CLIP | {"dual_clip": 3.0},
            (-1.0, -3.0, -0.8, -0.9, -1.0),
            OF_TOKENS,
            0.417289950119277,
            [-0.1317147924, 0.0, -0.0592654575, 0.2687086063, -0.0804384054],
            id="dual_clip",
        ),
        pytest.param(
            "cispo",
            CLIP,
            PROXIMAL,
            [w / 5 for w in STALE],
            0.03329652014119518,
            [-0.2345093291, 0.2506265487, -0.0579095946, 0.4352624146, -0.0711185490],
            id="cispo_with_token_is",
        ),
        pytest.param(
            "gspo",
            CLIP,
            PROXIMAL,
            [w * n for w, n in zip(STALE_SEQUENCES, OF_SEQUENCES, strict=True)],
            -0.06433245613699731,
            [-0.0674929396] * 3 + [0.0690731814] * 2,
            id="gspo_sequence_is",
        ),
        # Its weights have a lower bound of 0.7 too, and none of them is below.
        pytest.param(
            "tis_ppo",
            CLIP | {"cap": 1.3},
            SAMPLED,
            OF_TOKENS,
            0.3209028399844618,
            TRUNCATED,
            id="tis_token",
        ),
        pytest.param(
            "decoupled_ppo",
            CLIP | {"behavior_weight_cap": 1.3, "action": "truncate"},
            SAMPLED,
            OF_TOKENS,
            0.3209028399844618,
            TRUNCATED,
            id="tis_token of decoupled_ppo",
        ),
        pytest.param(
            "icepop",
            CLIP | {"low": 0.75, "high": 1.25},
            SAMPLED,
            OF_TOKENS,
            -0.21450241430239975,
            [-0.1608768107, 0.0, -0.0536256036, 0.0, 0.0],
            id="icepop_token",
        ),
    ],
)
def test_values_and_gradients_are_those_of_nemo_rl(algo, options, behavior, weights, loss, slopes):
    def tensor(values):
        return torch.tensor(values, dtype=torch.float64)

    inputs = replace(
        random_inputs(5),
        logprobs=tensor(CURRENT).requires_grad_(),
        proximal_logprobs=tensor(PROXIMAL),
        behavior_logprobs=tensor(behavior),
        advantages=tensor([1.2, -0.7, 0.4, -1.1, 0.6]),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1]),
    )
    losses, _ = LOSSES[algo](inputs, **options)
    total = (losses * tensor(weights)).sum()
    (found,) = torch.autograd.grad(total, inputs.logprobs)
    assert total.item() == pytest.approx(loss, abs=1e-7)
    assert found.tolist() == pytest.approx(slopes, abs=1e-7)
