"""A whole job on two nodes: two torchrun agents on one machine, each with a trainer rank and a vLLM worker."""

import itertools
import re

import pytest
from real_job import ROOT, assert_ledger_balances, start_nodes

from asyncrl.controller.tickets import IDS_PER_NODE
from asyncrl.runlog.header import read_run_id
from scripts.lines import read

pytestmark = pytest.mark.e2e


PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
AGENT = re.search(r"```python\n(.+?)```", PAGE, re.DOTALL)[1]
TASKS = {
    "agent": {
        "task": "agent:guess.py:run",
        "model": "data/tiny/guess_number",
        "max_prompt_tokens": 8,
        "max_response_tokens": 24,
    },
    "environment": {"task": "frozen_lake", "max_prompt_tokens": 64, "max_response_tokens": 128},
}


@pytest.mark.parametrize("kind", ["agent", pytest.param("environment", marks=pytest.mark.slow)])
def test_two_nodes_train_one_policy_of_several_turns_each_on_samples_of_its_own(tmp_path, kind):
    """Spare members are aborted when a group is whole, and an update interrupts responses."""
    (tmp_path / "guess.py").write_text(AGENT)
    task = TASKS[kind] | {"task": TASKS[kind]["task"].replace("guess.py", f"{tmp_path}/guess.py")}
    options = {"extra_members": 1, "stale_policy": "drop", "on_update": "resume", "eval_every": 4}
    jobs = start_nodes(tmp_path, 2, steps=4, async_ratio=1, **task, **options)
    assert [job.wait() for job in jobs] == [0, 0], "".join(job.output()[-3000:] for job in jobs)
    metrics = jobs[0].metrics()
    assert jobs[0].values("samples") == [32, 64, 96, 128]
    assert jobs[0].values("ledger/groups_consumed") == [8, 16, 24, 32]
    consumed = [0, *jobs[0].values("ledger/tokens_consumed")]
    assert jobs[0].values("tokens/trained") == [b - a for a, b in itertools.pairwise(consumed)]
    assert max(jobs[0].values("staleness/max")) <= 1
    assert min(jobs[0].values("response/turns_mean")) > 1
    assert metrics[-1]["ledger/tokens_dropped_surplus"] > 0, "a spare member that was not needed"
    assert max(jobs[0].values("mismatch/abs_max")) < 1e-4
    assert max(line["drift/k3"] for line in metrics if line["staleness/max"] == 0) < 1e-6, (
        "what was sampled is trained"
    )
    assert metrics[-1]["eval/problems"] == (2 if kind == "agent" else 32)
    assert {0, 4} <= {*jobs[0].values("eval/policy_version")}
    assert_ledger_balances(metrics)
    of_nodes = [
        read_trajectories(jobs[0].run_path / folder / "events.jsonl") for folder in (".", "node_1")
    ]
    assert read_run_id(jobs[0].run_path) == read_run_id(jobs[0].run_path / "node_1")
    for node, trajectories in enumerate(of_nodes):
        assert {
            event["group"] // IDS_PER_NODE for event in trajectories if event["group"] >= 0
        } == {node}
    sampled = sum(event["tokens"] for events in of_nodes for event in events if event["group"] >= 0)
    assert metrics[-1]["tokens/generated"] <= sampled


def read_trajectories(path):
    return [event for event in read(path) if event["event"] == "trajectory"]
