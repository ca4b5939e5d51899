"""The bench of shared prefixes: run on recorded batches of a tiny model, its table against prefixes counted by hand."""

import pytest
from tiny_policy import grouped_sequences, save_tiny_model

from asyncrl.config import Config, OptimOptions
from asyncrl.records import Group, Trajectory
from asyncrl.runlog.batches import batch_path, weights_sha256, write_batch
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.tasks import load_task
from scripts.bench import harness, trees
from scripts.lines import read

WORK = "prompts tiny"


@pytest.fixture
def recordings(tmp_path):
    """A folder with one recorded run: two steps of three groups, each of four responses to a prompt of its own."""
    model = save_tiny_model(str(tmp_path / "model"))
    config = Config(
        model=model, steps=2, groups_per_step=3, group_size=4, record=True, optim=OptimOptions(warmup=0),
        runs_dir=str(tmp_path / "recordings"), run_name=WORK.replace(" ", "-"),
    )  # fmt: skip
    directory = RunDirectory(config, weights_sha256=weights_sha256(model))
    for step in (1, 2):
        sequences = grouped_sequences(3, 4, seed=step, max_prompt=30)
        groups = [
            Group(i, tuple(trajectory(s, i, j) for j, s in enumerate(sequences[4 * i : 4 * i + 4])))
            for i in range(3)
        ]
        write_batch(batch_path(directory.path, step), step, groups)
    directory.close()
    return directory.path.parent


def trajectory(sequence, group_id, member):
    """A response of the first version, as if a run had sampled it."""
    return Trajectory(
        ticket_id=0, group_id=group_id, member=member, tokens=sequence.tokens, loss_mask=sequence.loss_mask,
        behavior_logprobs=sequence.behavior_logprobs, policy_versions=sequence.policy_versions.clip(max=0),
        reward=sequence.reward, finish_reason="stop", failure="", num_turns=1, started_at=0.0, ended_at=1.0, worker=0,
    )  # fmt: skip


def share_of_a_tree(step):
    """Share of a step's tokens that is not in a tree of all its sequences: one token for each different beginning."""
    tokens = [s.tokens.tolist() for s in grouped_sequences(3, 4, seed=step, max_prompt=30)]
    beginnings = {tuple(one[: i + 1]) for one in tokens for i in range(len(one))}
    return 1 - len(beginnings) / sum(map(len, tokens))


@pytest.mark.slow
def test_the_bench_measures_each_way_to_share_in_turn_and_its_table_says_what_a_tree_would_save(
    recordings, tmp_path, monkeypatch
):
    options = (
        "--only",
        WORK,
        "--repeats",
        1,
        "--recordings",
        recordings,
        "--out",
        tmp_path / "out",
    )
    monkeypatch.setattr("sys.argv", ["trees.py", *map(str, options)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    records = harness.main(trees.BENCH)
    assert [r["arm"] for r in records] == ["off", "prompt", "tree"]
    wanted = (share_of_a_tree(1) + share_of_a_tree(2)) / 2
    heading, _, *rows = (line.strip("| ").split(" | ") for line in trees.table(records))
    for row, record in zip(rows, records, strict=True):
        found = dict(zip(heading, row, strict=True))
        assert found["POR, %"] == f"{100 * wanted:.1f}"
        assert found["1/(1 − POR)"] == f"{1 / (1 - wanted):.2f}"
        assert record["seconds"] > 0 and record["peak"] > record["added"] >= 0
        assert record["grad_norm"] == pytest.approx(records[0]["grad_norm"], rel=1e-3)
    off, prompt, tree = (r["tokens/saved_share"] for r in records)
    assert off == 0 < prompt <= tree <= wanted + 1e-9
    assert "\n".join(trees.table(records)) in (tmp_path / "out" / "table.md").read_text()


def test_a_round_whose_gradients_differ_or_vanish_is_refused():
    def round_of(norms, dtype="float32"):
        measured = ({"grad_norm": norm, "dtype": dtype} for norm in norms)
        return trees.of_round(dict(zip(trees.ARMS, measured, strict=True)))

    assert [r["arm"] for r in round_of([2.0, 2.001, 2.002])] == list(trees.ARMS)
    assert round_of([2.0, 2.001, 2.01], "bfloat16")
    with pytest.raises(RuntimeError, match=r"2\.01\]: they must agree to 0\.001"):
        round_of([2.0, 2.001, 2.01])
    with pytest.raises(RuntimeError, match="above 0"):
        round_of([0.0, 0.0, 0.0], "bfloat16")


def test_rows_have_five_answered_problems_before_the_question_others_or_the_same(tmp_path):
    same, other = (
        read(trees.write_rows(tmp_path / f"{of}-sums.jsonl")) for of in ("same", "other")
    )
    problems = [load_task("sums:one_digit", 0).train_problem(i) for i in range(6)]
    shown = " ".join(f"{p.prompt} {p.answer}" for p in problems[:5])
    assert same[0] == {"prompt": f"{shown} {problems[5].prompt}", "answer": problems[5].answer}
    assert all(row["prompt"].startswith(shown) for row in same)
    assert len({row["prompt"].rpartition(" What")[0] for row in other}) > 200
    assert all(row["prompt"].count("?") == 6 for row in other)
