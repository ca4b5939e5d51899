"""The centering term is that of a loop over tokens, and takes a constant advantage's gradient away."""

import math

import pytest
import torch

from algos import LOSSES, LossInputs
from algos.centering import centering_term
from algos.inputs import couples_tokens
from asyncrl.config import Config
from asyncrl.trainer.loss_choice import choose_loss, reads_sequences, try_loss

VOCAB = 12
BY_TOKEN = [
    name for name, loss in LOSSES.items() if not couples_tokens(loss) and not reads_sequences(loss)
]


def random_policies(num_tokens, spread):
    """Logits [N, V] of the current policy, and log-probs of the one that sampled, float64."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_tokens, VOCAB)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    moved = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
    return logits.requires_grad_(), (logits.detach() + moved).log_softmax(1)


def inputs_of(logprobs, behavior, tokens, advantages):
    """The inputs of a loss: `tokens` [N] were sampled from `behavior` [N, V]."""
    places = torch.arange(len(tokens)), tokens
    picked = logprobs[places]
    return LossInputs(
        picked, behavior[places], picked.detach(), advantages, advantages.round(), places[0]
    )


def plain_term(loss, advantage, logprobs, behavior, head):
    """The term of one token by a loop, and the head's mass. Both policies are given on the whole vocabulary."""

    def weight(logprob, behavior_logprob):
        varied = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
        values = torch.tensor([advantage], dtype=torch.float64)
        one = LossInputs(
            varied,
            torch.tensor([behavior_logprob], dtype=torch.float64),
            varied.detach(),
            values,
            values.round(),
            torch.tensor([0]),
        )
        (slope,) = torch.autograd.grad(loss(one)[0].sum(), varied)
        return -slope.item()

    left = 1 - sum(math.exp(behavior[v]) for v in head)
    left_now = 1 - sum(math.exp(logprobs[v]) for v in head)
    ratio = left / left_now if len(head) < VOCAB else 0.0
    of_tail = ratio * weight(-20 - math.log(ratio), -20.0) if ratio else 0.0
    term = 0.0
    for v in head:
        now = logprobs[v].item()
        factor = math.exp(behavior[v]) * weight(now, behavior[v].item())
        term = term + (factor - of_tail * math.exp(now)) * logprobs[v]
    return term, 1 - left


@pytest.mark.parametrize("size", [5, VOCAB])
@pytest.mark.parametrize("algo", BY_TOKEN)
def test_term_is_that_of_a_loop(algo, size):
    logits, behavior = random_policies(9, spread=0.7)
    logprobs = logits.log_softmax(1)
    advantages = torch.linspace(-1.4, 1.7, 9, dtype=torch.float64)
    head = behavior.topk(size).indices
    inputs = inputs_of(logprobs, behavior, torch.arange(9), advantages)
    loss = LOSSES[algo]
    term, stats = centering_term(loss, inputs, logprobs.gather(1, head), behavior.gather(1, head))
    expected = [
        plain_term(loss, advantages[t].item(), logprobs[t], behavior[t], head[t].tolist())
        for t in range(9)
    ]
    terms, masses = zip(*expected, strict=True)
    torch.testing.assert_close(term, torch.stack(terms))
    assert stats["head_mass"].tolist() == pytest.approx(masses)
    assert not any(column.requires_grad for column in stats.values())
    slopes, plain_slopes = (
        torch.autograd.grad(values.sum(), logits, retain_graph=True)[0]
        for values in (term, torch.stack(terms))
    )
    torch.testing.assert_close(slopes, plain_slopes)
    (one_slope,) = torch.autograd.grad(term[4], logits, retain_graph=True)
    inside = torch.zeros(VOCAB, dtype=torch.bool)
    inside[head[4]] = True
    assert stats["drift_term"][4].item() == pytest.approx(
        one_slope[4, inside].abs().sum().item() / 2
    )


@pytest.mark.parametrize(("size", "spread"), [(VOCAB, 0.7), (5, 0.0)])
@pytest.mark.parametrize("algo", BY_TOKEN)
def test_a_constant_advantage_has_no_mean_gradient(algo, size, spread):
    """The mean over the tokens that could have been sampled: with the whole vocabulary, or where nothing has moved."""
    logits, behavior = random_policies(1, spread)
    logprobs = logits.log_softmax(1).expand(VOCAB, -1)
    behavior = behavior.expand(VOCAB, -1)
    inputs = inputs_of(logprobs, behavior, torch.arange(VOCAB), torch.full((VOCAB,), 0.8).double())
    head = behavior.topk(size).indices
    term, stats = centering_term(
        LOSSES[algo], inputs, logprobs.gather(1, head), behavior.gather(1, head)
    )
    chances = behavior[0].exp()
    losses, _ = LOSSES[algo](inputs)
    (uncentered,) = torch.autograd.grad((chances * losses).sum(), logits, retain_graph=True)
    (centered,) = torch.autograd.grad((chances * (losses + term)).sum(), logits)
    assert centered.abs().max() < 1e-9
    assert (stats["drift_term"] > 1e-3).all() == (uncentered.abs().max() > 1e-3)
    if algo in ("reinforce", "tis", "grpo"):  # a whole ratio has no drift, until it is cut
        assert (uncentered.abs().max() > 1e-3) == (spread > 0)


def test_rounding_of_a_head_with_all_tokens_is_no_tail():
    logits, behavior = random_policies(400, spread=0.7)
    exact, rounded = (
        centering_term(
            LOSSES["reinforce"],
            inputs_of(logprobs, sampled, torch.zeros(400, dtype=torch.int64), ones),
            logprobs,
            sampled,
        )[0]
        for logprobs, sampled, ones in (
            (logits.log_softmax(1), behavior, torch.ones(400).double()),
            (logits.float().log_softmax(1), behavior.float(), torch.ones(400)),
        )
    )
    torch.testing.assert_close(rounded.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"top_logprobs": 0}, "--centering needs the likeliest tokens"),
        ({"top_p": 0.9}, "leaves tokens out"),
        ({"minibatches": 2}, "one update per step"),
        ({"algo": "gspo"}, "--algo gspo weighs whole sequences"),
        ({"algo": "m2po"}, "--algo m2po weighs whole sequences"),
    ],
)
def test_what_has_no_term_is_refused(options, error):
    with pytest.raises(ValueError, match=error):
        choose_loss(Config(**({"centering": True, "top_logprobs": 8} | options)).checked())


def test_a_loss_that_reads_recorded_columns_is_refused_before_the_run():
    def margin(inputs):
        return -inputs.columns["top_logprobs"][:, 0] * inputs.logprobs, {}

    try_loss(margin, num_top=3)
    with pytest.raises(KeyError, match="top_logprobs"):
        try_loss(margin, num_top=3, is_centered=True)
    with pytest.raises(KeyError, match="top_logprobs"):
        try_loss(margin)  # without --top-logprobs
