"""An engine that is late, or lacks some tensors, is told from one that rounds in another way, in each dtype.

Trainer and engine are one tiny model twice: in one dtype, but with attention that rounds in other ways. The weights are
those of Adam, in float32. What an engine scores follows from its weights alone, so a late engine is an index.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_families import tiny_config
from transformers import Qwen3ForCausalLM

from asyncrl.config import Config
from asyncrl.job.arrival import SURE, Arrivals, measure_arrival
from asyncrl.job.engine_check import EngineCheck

DTYPES = ["float32", "bfloat16", "float16"]
NUM_SEQUENCES, LENGTH = 32, 17
FIRST = 3
"""The first version that is wrong."""


def make_model(attention: str) -> Qwen3ForCausalLM:
    config = tiny_config("qwen3", hidden_size=64, initializer_range=0.1)
    config._attn_implementation = attention
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def score(model, weights, tokens, dtype):
    """Log-probs [N] of all tokens but the first of each sequence."""
    model.load_state_dict(weights)
    model.to(getattr(torch, dtype))
    logprobs = model(tokens).logits.float().log_softmax(dim=-1)
    return logprobs[:, :-1].gather(2, tokens[:, 1:, None]).flatten().numpy()


@functools.cache
def scores_of(dtype: str, num_versions: int, lr: float = 1e-4):
    """The trainer's scores by version, the engine's, and those of an engine that has every other tensor of the version
    before."""
    torch.manual_seed(0)
    trained, trainer, engine = make_model("sdpa"), make_model("sdpa"), make_model("eager")
    optimizer = torch.optim.Adam(trained.parameters(), lr=lr)
    tokens = torch.randint(0, 150, (NUM_SEQUENCES, LENGTH))
    right, whole, half = [], [], []
    before = None
    for _ in range(num_versions):
        weights = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
        mixed = weights | {name: (before or weights)[name] for name in list(weights)[::2]}
        right.append(score(trainer, weights, tokens, dtype))
        whole.append(score(engine, weights, tokens, dtype))
        half.append(score(engine, mixed, tokens, dtype))
        before = weights
        batch = tokens[torch.randint(0, NUM_SEQUENCES, (16,))]
        trained(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return right, whole, half


def arrivals_of(trainer, engine) -> Arrivals:
    """What is known after all versions that have neighbours."""
    arrivals = Arrivals()
    for version in range(2, len(trainer) - 1):
        arrivals.add(version, engine[version], trainer[version - 2 : version + 2])
    return arrivals


def first_alarm(trainer, engine) -> int | None:
    """The publish at which an engine is surely behind: that after the last version that was compared."""
    arrivals = Arrivals()
    for version in range(2, len(trainer) - 1):
        arrivals.add(version, engine[version], trainer[version - 2 : version + 2])
        if arrivals.recent is not None and arrivals.recent.late_sigmas > SURE:
            return version + 1
    return None


FAULTS = {
    "one version late": lambda whole, half, version: whole[version - 1],
    "one version skipped": lambda whole, half, version: whole[version - (version == FIRST)],
    "stale for good": lambda whole, half, version: whole[FIRST - 1],
    "half of the tensors a version late": lambda whole, half, version: half[version],
}
"""What an engine scores from version FIRST on."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_sure_within_five_publishes_at_a_learning_rate_of_1e_4(dtype, fault):
    trainer, whole, half = scores_of(dtype, 9)
    wrong = [FAULTS[fault](whole, half, version) for version in range(FIRST, len(whole))]
    assert first_alarm(trainer, whole[:FIRST] + wrong) <= FIRST + 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_that_has_its_versions_is_never_behind_and_surely_right(dtype):
    trainer, whole, _ = scores_of(dtype, 9)
    assert first_alarm(trainer, whole) is None
    arrival = arrivals_of(trainer, whole).whole
    assert arrival.current_sigmas > SURE
    assert abs(arrival.versions_behind) < 0.05 < 0.8 < arrival.versions_ahead < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
def test_no_honest_run_of_300_publishes_is_behind(lr):
    trainer, whole, _ = scores_of("bfloat16", 300, lr)
    assert first_alarm(trainer, whole) is None


def test_a_fault_after_many_versions_that_were_right_is_not_diluted():
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.01, (400, 1000)).cumsum(axis=0)
    trainer, engine = (weights + rng.normal(0, 0.01, weights.shape) for _ in range(2))
    assert first_alarm(trainer, engine) is None
    late = np.concatenate([engine[:300], engine[299:-1]])
    alarm = first_alarm(trainer, late)
    assert 300 < alarm <= 305
    arrivals = arrivals_of(trainer[: alarm + 1], late)
    assert arrivals.whole.late_sigmas < SURE
    leader = Leader(arrivals)
    with pytest.raises(RuntimeError, match=r"^worker 0 has older weights than it says"):
        EngineCheck(leader).check(alarm)
    assert leader.event["late_sigmas"] == arrivals.recent.late_sigmas > SURE
    assert leader.event["versions_behind"] == arrivals.whole.versions_behind


class Leader:
    """What EngineCheck asks of a node whose worker 0 was compared."""

    def __init__(self, arrivals):
        self.config, self.device = Config(dtype="float32"), torch.device("cpu")
        self.placement = SimpleNamespace(transport="shm")
        self.arrivals = {0: arrivals}
        self.probe = self.controller = self.run = self

    def take_probes(self):
        return {}

    def compare(self, probes):
        return []

    def compare_neighbours(self):
        return [(7, 0)]

    def record_event(self, event, **fields):
        self.event = fields

    def try_to_ban_host(self, worker, problem):
        return False

    def is_believed(self, worker):
        return True


def test_versions_that_are_equal_after_right_ones_are_no_fault():
    """As after steps whose groups have equal rewards."""
    rng = np.random.default_rng(0)
    changing = rng.normal(0, 0.01, (6, 1000)).cumsum(axis=0)
    trainer = [*changing, *[changing[-1]] * 4]
    engine = [scores + rng.normal(0, 1e-4, 1000) for scores in trainer]
    arrivals = arrivals_of(trainer, engine)
    assert arrivals.recent is None and arrivals.whole.current_sigmas > SURE
    EngineCheck(Leader(arrivals)).check(len(trainer))


@pytest.mark.parametrize(
    ("noise", "line"),
    [(0.0, "no weight has changed, so "), (0.01, "the probe cannot tell whether weights came to worker 0")],
)  # fmt: skip
def test_without_a_change_nothing_can_be_told(noise, line, capsys):
    """Also if the trainer rounds at random, as kernels on a GPU do. A short run does not report that."""
    rng = np.random.default_rng(0)
    trainer = [rng.normal(0, noise, 1000) for _ in range(30)]
    engine = [rng.normal(0, noise, 1000) for _ in range(30)]
    assert first_alarm(trainer, engine) is None
    arrival = arrivals_of(trainer, engine).whole
    assert arrival is None if noise == 0 else arrival.current_sigmas < SURE
    EngineCheck(Leader(arrivals_of(trainer[:7], engine[:7]))).finish()
    assert capsys.readouterr().out == ""
    EngineCheck(Leader(arrivals_of(trainer[:8], engine[:8]))).finish()
    printed = capsys.readouterr().out
    assert printed.startswith(line) and "float32" not in printed


def test_a_constant_difference_between_trainer_and_engine_is_no_lag():
    """Of whatever size, and however long it is seen: a log-prob moves in one direction for good here."""
    rng = np.random.default_rng(0)
    speed, offset = rng.normal(0, 0.01, 1000), rng.normal(0, 0.1, 1000)
    trainer = [version * speed for version in range(300)]
    assert first_alarm(trainer, [scores + offset for scores in trainer]) is None


def test_slopes_and_their_errors_are_those_of_least_squares():
    """By the sandwich formula of White, with each token as one cluster."""
    rng = np.random.default_rng(0)
    changes = rng.normal(size=(5, 40))
    distances = 0.3 * changes + rng.normal(size=(5, 40))
    products, squares = (changes * distances).sum(axis=0), (changes**2).sum(axis=0)
    slope = np.linalg.lstsq(changes.reshape(-1, 1), distances.flatten())[0][0]
    meat = sum((changes[:, i] @ (distances[:, i] - slope * changes[:, i])) ** 2 for i in range(40))
    arrival = measure_arrival(np.stack([products, products]), np.stack([squares, squares]))
    assert arrival.versions_behind == arrival.versions_ahead == pytest.approx(slope)
    assert arrival.versions_behind_error == pytest.approx(meat**0.5 / (changes**2).sum())
    late_sigmas = arrival.versions_behind / arrival.versions_behind_error
    assert arrival.late_sigmas == pytest.approx(late_sigmas)
    assert arrival.current_sigmas == pytest.approx(0)
    assert measure_arrival(np.zeros((2, 40)), np.zeros((2, 40))) is None


def test_a_version_that_is_scored_again_counts_once():
    trainer, whole, _ = scores_of("float32", 9)
    arrivals = Arrivals()
    for _ in range(3):
        arrivals.add(2, whole[2], trainer[:4])
    assert arrivals.whole == arrivals_of(trainer[:4], whole).whole
