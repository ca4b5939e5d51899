import statistics
from types import SimpleNamespace

import pytest
import torch
from tiny_policy import load, random_sequences, save_tiny_model

from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.packing import bundle, pack
from scripts.bench import harness, parts
from scripts.bench.work import LONG, SHORT, WORKS, work_of
from scripts.lines import read


@pytest.fixture
def model_path(tmp_path):
    return save_tiny_model(str(tmp_path / "model"))


def test_forced_lengths_follow_their_law():
    long = [LONG.length(seed) for seed in range(4000)]
    assert long == [LONG.length(seed) for seed in range(4000)]
    assert min(long) >= 1 and max(long) == 256
    assert statistics.median(long) == pytest.approx(30, rel=0.05)
    assert statistics.fmean(long) == pytest.approx(47, rel=0.05)
    assert {SHORT.length(seed) for seed in range(100)} == {4}


def test_a_work_is_known_by_its_longest_response():
    assert all(work_of(work.config().max_response_tokens) is work for work in WORKS.values())


def test_the_plain_step_moves_the_weights_as_our_step_does_with_plain_policy_gradient(
    one_rank, model_path
):
    config = Config(model=model_path, algo="reinforce", optim=OptimOptions(warmup=0), lr=1e-2)
    sequences = random_sequences(12)
    policy, plain = load(config), parts.PlainStep(config, model_path)
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    version = int(max(s.policy_versions.max() for s in sequences))
    policy.train_step([[bundle(sequences[:5]), bundle(sequences[5:])]], policy_version=version)
    plain.step([pack(bundle(half), one_row=False) for half in (sequences[:5], sequences[5:])])
    for (name, ours), (_, theirs) in zip(
        policy.named_full_parameters(), plain.model.named_parameters(), strict=True
    ):
        assert not torch.equal(theirs, before[name])
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_sequences_of_a_work_have_its_lengths(model_path):
    sequences = parts.make_sequences(LONG.config(model=model_path), model_path, count=16)
    assert [s.num_trained for s in sequences] == [LONG.length(i) for i in range(16)]
    assert not any(s.loss_mask[0] for s in sequences)


def test_a_ratio_is_ours_by_the_limit_and_a_speed_up_the_other_way_round():
    assert parts.record("rollout long", 90.0, 100.0, n=7)["ratio"] == pytest.approx(0.9)
    halves = {"pause_s": 0.1, "generate_alone_s": 1.0, "train_alone_s": 0.4}
    found = {f"α={ratio}": {"step_s": s, **halves} for ratio, s in enumerate((2.0, 1.25, 1.0))}
    ratios = {r["part"]: r["ratio"] for r in parts.against_synchronous(found)}
    wanted = {"overlap α=1": 1.25, "pause α=2": 0.1, "speed-up natural α=1": 1.6}
    assert wanted.items() <= ratios.items()


def test_every_case_is_there_in_both_sizes():
    for size in parts.STEPS:
        cases = list(parts.cases(SimpleNamespace(size=size)))
        assert {case.name.split()[0] for case in cases} == {"trainer", "job"}


def test_the_records_of_the_repository_give_their_page():
    folder = harness.ROOT / "results/parts"
    records = read(folder / "parts.jsonl")
    page = (folder / "table.md").read_text()
    assert page.endswith("\n\n".join(parts.report(records)) + "\n")
    lines = parts.summary(records)
    assert len(lines) == 2 + 16
    assert "| trainer long | train_step | plain step | 0.894 [0.842–0.929] | ≥ 0.9 | no |" in lines
