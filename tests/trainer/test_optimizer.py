"""The learning rate of each update, and how it follows the effective sample size of whole sequences."""

import math
import re

import numpy as np
import pytest
import torch
from test_policy import load, make_config, random_sequences, share_of
from tiny_policy import save_tiny_model

from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.lag_stats import TokenStats
from asyncrl.trainer.optimizer import learning_rate, make_optimizer, try_optimizer
from asyncrl.trainer.packing import bundle
from asyncrl.trainer.policy import Policy


def rates(*, ess: float = 1.0, **options) -> list[float]:
    config = Config(lr=0.1, steps=5, minibatches=2, optim=OptimOptions(warmup=2, **options))
    return [learning_rate(config, update, update / 2, ess) for update in range(10)]


def test_after_warm_up_the_rate_is_constant_or_falls_to_its_least_at_the_last_update():
    assert rates() == pytest.approx([0.05] + [0.1] * 9)
    assert rates(schedule="linear", least=0.2)[-1] == pytest.approx(0.02)
    assert rates(schedule="linear")[5] == pytest.approx(0.1 * (1 - 4 / 8))
    assert rates(schedule="cosine")[5] == pytest.approx(0.1 * (1 + math.cos(math.pi / 2)) / 2)
    assert rates(schedule="cosine")[-1] == pytest.approx(0.0, abs=1e-12)


def test_a_schedule_goes_on_where_it_was_if_the_run_goes_on_with_other_epochs():
    """4 of 8 steps with two epochs each, then with one, and the other way round."""
    for before, after in ((2, 1), (1, 2)):
        lrs, made = [], 0
        for step in range(8):
            epochs = before if step < 4 else after
            config = Config(
                lr=0.1, steps=8, optim=OptimOptions(warmup=0, schedule="linear", epochs=epochs)
            )
            for epoch in range(epochs):
                lrs.append(learning_rate(config, made, step + epoch / epochs))
                made += 1
        done = [
            *(np.arange(1, 4 * before + 1) / before),
            *(4 + np.arange(1, 4 * after + 1) / after),
        ]
        assert lrs == pytest.approx([0.1 * (1 - steps / 8) for steps in done])


def test_by_ess_the_rate_falls_with_the_root_of_the_effective_sample_size():
    assert rates(by_ess=True, ess=0.25)[5] == pytest.approx(0.05) and rates(ess=0.25)[
        5
    ] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (
            "weight_decy=0.1",
            "--optim.args weight_decy=0.1: --optimizer adamw takes eps, weight_decay, amsgrad, beta1, beta2; did you "
            "mean weight_decay?",
        ),
        ("beta2=1", "--optimizer adamw: Invalid beta parameter at index 1: 1.0"),
        ("weight_decay=-1", "--optimizer adamw: Invalid weight_decay value: -1.0"),
    ],
)
def test_what_the_optimizer_does_not_take_is_one_line(item, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        try_optimizer(Config(optim=OptimOptions(args=(item,))))


@pytest.mark.parametrize(
    ("optimizer", "items", "expected"),
    [
        ("adamw", (), {"betas": (0.9, 0.999), "weight_decay": 0.0, "fused": True}),
        ("adamw", ("beta2=0.95", "weight_decay=0.1"), {"betas": (0.9, 0.95), "weight_decay": 0.1}),
        ("adam", ("amsgrad=true",), {"amsgrad": True, "weight_decay": 0}),
        ("sgd", ("momentum=0.9", "nesterov=true"), {"momentum": 0.9, "nesterov": True}),
        ("rmsprop", ("alpha=0.9", "centered=true"), {"alpha": 0.9, "centered": True}),
        ("adafactor", ("weight_decay=0.1", "d=2"), {"weight_decay": 0.1, "d": 2.0}),
    ],
)
def test_each_optimizer_gets_its_options_by_the_names_of_its_signature(optimizer, items, expected):
    config = Config(optimizer=optimizer, lr=0.25, optim=OptimOptions(warmup=3, args=items))
    try_optimizer(config)
    made = make_optimizer(config, [{"params": [torch.ones(2, 2, requires_grad=True)], "lr": 0.25}])
    assert expected.items() <= made.defaults.items() and made.defaults["lr"] == 0.25


OWN_OPTIMIZERS = """
from torch.optim import LBFGS, SGD


def halved(groups, *, lr, share: float = 0.5):
    return SGD([{"params": group["params"], "lr": group["lr"] * share} for group in groups])


def nothing(groups):
    return None


class Listed(SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = [parameter.grad]
"""


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            "adamx",
            "--optimizer 'adamx' is none of adamw, adam, sgd, rmsprop, adafactor, nor FILE.py:NAME; did you mean",
        ),
        ("FILE:nothing", "TypeError: it made a NoneType; give what makes a torch.optim.Optimizer"),
        ("FILE:LBFGS", "step() missing 1 required positional argument: 'closure'"),
        ("FILE:Listed", "TypeError: Object of type Tensor is not JSON serializable"),
    ],
)
def test_what_is_no_optimizer_of_this_trainer_is_one_line(tmp_path, optimizer, words):
    path = tmp_path / f"optimizers_{abs(hash(optimizer))}.py"
    path.write_text(OWN_OPTIMIZERS)
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        try_optimizer(Config(optimizer=optimizer.replace("FILE", str(path))))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("one_rank")
def test_groups_of_the_users_own_keep_their_share_of_the_learning_rate(tmp_path):
    path, own = save_tiny_model(tmp_path, tied=True), tmp_path / "halved_optimizer.py"
    own.write_text(OWN_OPTIMIZERS)
    options = {"lr": 0.5, "max_grad_norm": 1e9}
    config = make_config(
        path,
        optimizer=f"{own}:halved",
        optim=OptimOptions(warmup=2, args=("share=0.25",)),
        **options,
    )
    plain = make_config(
        path, optimizer="sgd", optim=OptimOptions(warmup=2), **(options | {"lr": 0.125})
    )
    ends = []
    for policy in (load(config), load(plain)):
        measured = policy.train_step(share_of(random_sequences(4)), policy_version=12)
        assert measured["lr"] == policy.config.lr / 2, "the first of two updates of warm-up"
        ends.append(weights_of(policy))
    assert torch.equal(*ends)


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().full_tensor().flatten() for p in policy.module.parameters()])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("minibatches", [1, 3])
def test_two_epochs_are_the_updates_of_two_passes_in_another_order(tmp_path, minibatches):
    path, sequences = save_tiny_model(tmp_path, tied=True), random_sequences(6)
    size = 6 // minibatches
    updates = [[bundle(sequences[i : i + size])] for i in range(0, 6, size)]
    optim = {"minibatches": minibatches, "lr": 0.01, "seed": 3}
    together = load(make_config(path, **optim, optim=OptimOptions(warmup=3, epochs=2)))
    shares, update = [], together._update

    def record_and_update(batches, policy_version, progress, stats):
        shares.append(progress)
        return update(batches, policy_version, progress, stats)

    together._update = record_and_update
    stats = together.train_step(updates, policy_version=12)
    one_by_one = load(make_config(path, **optim, optim=OptimOptions(warmup=3)))
    second = np.random.default_rng((3, 12, 1)).permutation(minibatches).tolist()
    found = [
        one_by_one.train_step([updates[i]], policy_version=12)
        for i in [*range(minibatches), *second]
    ]
    assert torch.equal(weights_of(together), weights_of(one_by_one))
    assert together.num_updates == 2 * minibatches and stats["tokens"] == sum(
        of["tokens"] for of in found
    )
    assert stats["lr"] == found[-1]["lr"] and stats["loss"] == pytest.approx(
        sum(of["loss"] for of in found) / len(found)
    )
    assert shares == [made / (2 * minibatches) for made in range(2 * minibatches)]
    assert minibatches == 1 or second != [0, 1, 2], "a seed whose second epoch has another order"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("algo", ["decoupled_ppo", "tis"])
def test_in_every_epoch_proximal_logprobs_are_those_before_the_first_whatever_the_micro_batches(
    tmp_path, algo
):
    path, sequences, ends = save_tiny_model(tmp_path, tied=True), random_sequences(8), []
    for budget in (30, 10_000):
        options = {
            "algo": algo,
            "algo_args": (),
            "lr": 1e-3,
            "optim": OptimOptions(warmup=0, epochs=2),
        }
        policy, seen = load(make_config(path, **options)), []
        loss = policy.loss
        policy.loss = lambda inputs, seen=seen, loss=loss: seen.append(inputs) or loss(inputs)
        policy.train_step(share_of(sequences, budget), policy_version=12)
        half = len(seen) // 2
        for first, second in zip(seen[:half], seen[half:], strict=True):
            assert torch.equal(first.proximal_logprobs, second.proximal_logprobs)
            assert not torch.allclose(second.logprobs, second.proximal_logprobs, atol=1e-3)
        ends.append(weights_of(policy))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_the_sequences_of_an_update_set_its_rate(tmp_path):
    sequences = random_sequences(6)
    policy = load(
        make_config(
            save_tiny_model(tmp_path, tied=True), lr=0.01, optim=OptimOptions(warmup=1, by_ess=True)
        )
    )
    stats = policy.train_step(share_of(sequences), 12)
    assert 1 / 6 <= stats["sequence_ess"] < 1
    assert stats["lr"] == pytest.approx(0.01 * math.sqrt(stats["sequence_ess"]))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_entropy_bonus_pulls_by_the_gradient_of_the_entropy(tmp_path, top_p):
    path, sequences = save_tiny_model(tmp_path, tied=True), random_sequences(3)
    of = {"algo": "reinforce", "algo_args": (), "top_p": top_p}
    plain, with_bonus = (
        load(make_config(path, **of, optim=OptimOptions(entropy=entropy))) for entropy in (0.0, 0.5)
    )
    batch = [plain._pack(bundle(sequences), 12)]
    bonus = gradient_of(with_bonus, batch) - gradient_of(plain, batch)
    entropy = with_bonus._forward(with_bonus.module, batch[0]).entropy
    (-0.5 * entropy.mean()).backward()
    wanted = torch.cat([p.grad.full_tensor().flatten() for p in with_bonus.module.parameters()])
    torch.testing.assert_close(bonus, wanted, rtol=1e-3, atol=1e-6)
    assert bonus.norm() > 1e-3


def gradient_of(policy, batches) -> torch.Tensor:
    """The gradient of an update, which is not made."""
    policy._step = lambda loss, lr: {}
    policy._update(batches, 12, 0.0, TokenStats())
    found = torch.cat([p.grad.full_tensor().flatten().clone() for p in policy.module.parameters()])
    policy.optimizer.zero_grad()
    return found
