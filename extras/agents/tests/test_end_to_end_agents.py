"""Whole jobs whose trajectories are agents: real processes, the real engine, and OpenAI's client.

All are slow. tests/test_several_nodes.py has the agent of the page in every run, and test_agents.py and
test_agents_walk.py have the rest with an engine that is made up.
"""

import re
import sys
from pathlib import Path

import pytest
from real_job import ROOT, assert_ledger_balances, resume_job, start_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PAGE = (ROOT / "docs" / "agents.md").read_text()
GUESS = re.search(r"```python\n(.+?)```", PAGE, re.DOTALL)[1]
SIZES = {
    "model": "data/tiny/guess_number",
    "max_prompt_tokens": 8,
    "max_response_tokens": 24,
}


def run_agent(tmp_path, task, **options):
    """Run a job to its end by `python train_async.py`, without torchrun."""
    options = {**SIZES, "on_update": "resume", **options}
    job = start_job(tmp_path, agent=(), task=task, **options)
    assert job.wait() == 0, job.output()[-4000:]
    metrics = job.metrics()
    assert max(line["mismatch/abs_max"] for line in metrics if "mismatch/abs_max" in line) < 1e-4
    assert max(line["drift/k3"] for line in metrics if line["staleness/max"] == 0) < 1e-6, (
        "what was sampled is trained"
    )
    assert_ledger_balances(metrics)
    return job, metrics


BRANCHES = """
import asyncio

ASK = "Answer with a number from 1 to 31."


def problems(seed):
    return [{"n": n} for n in range(20)]


async def run(client, problem):
    async def ask(messages):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return [*messages, answer.choices[0].message]

    first = await ask([{"role": "user", "content": ASK}])
    words = ("higher", "lower", "higher")
    ways = await asyncio.gather(*(ask([*first, {"role": "user", "content": word}]) for word in words))
    shortened = await ask([ways[0][0], *ways[0][-2:], {"role": "user", "content": "lower"}])
    if problem["n"] == 3:
        await asyncio.sleep(3)
    return {"digits": sum(len(way[-1].content) for way in ways), "odd": len(shortened) % 2}
"""


def test_a_lag_of_exactly_k_with_branches_failures_and_a_shared_tree(tmp_path):
    (tmp_path / "branches.py").write_text(BRANCHES)
    job, metrics = run_agent(
        tmp_path,
        f"agent:{tmp_path / 'branches.py'}:run",
        steps=4,
        async_ratio=0,
        publish_delay=2,
        share_prefix="tree",
        env_timeout_s=2,
    )
    for lag in ("staleness/max", "staleness/mean"):
        assert [line[lag] for line in metrics] == [0, 1, 2, 2]
    assert all("reward/digits" in line for line in metrics)
    assert "branches" in (job.run_path / "samples.jsonl").read_text()
    assert metrics[-1]["tokens/saved_share"] > 0.3


def test_the_agent_of_the_page_starts_again_when_its_engine_is_killed_and_when_the_run_is_resumed(
    tmp_path,
):
    assert len(GUESS.splitlines()) <= 20
    (tmp_path / "guess.py").write_text(GUESS)
    task = f"agent:{tmp_path / 'guess.py'}:run"
    options = {"extra_members": 1, "stale_policy": "drop", "eval_every": 7, **SIZES}
    job = start_job(tmp_path, task=task, steps=40, save_every=2, **options)
    job.wait_until(lambda: job.num_steps() >= 2 and job.engine() is not None)
    job.engine().kill()
    job.wait_until(lambda: len(job.events("worker_started")) == 2 and job.num_steps() >= 5)
    job.kill()
    resumed = resume_job(job, steps=14)
    assert resumed.wait() == 0, resumed.output()[-3000:]
    metrics = resumed.metrics()
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert max(line["staleness/max"] for line in metrics) <= 1
    assert all(line["response/turns_mean"] > 1 for line in metrics)
    assert metrics[-1]["eval/problems"] == 2
    assert (job.run_path / "code" / "guess.py").exists()
    assert_ledger_balances(metrics)
    # no trajectory counts as failed because its engine died
    assert metrics[-1]["ledger/groups_dropped_failed"] == 0


PROGRAM = '''
import json, sys
from openai import OpenAI

row = json.loads(sys.stdin.readline())
client = OpenAI()
messages = [{"role": "user", "content": row["ask"]}]
answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
messages += [answer, {"role": "user", "content": "higher"}]
chunks = client.chat.completions.create(model="policy", messages=messages, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print(float(text > answer.content))
'''  # fmt: skip


def test_a_program_is_trained_by_partial_rollouts(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    rows = "".join(
        f'{{"ask": "Answer with a number from 1 to 31.", "n": {n}}}\n' for n in range(30)
    )
    Path(tmp_path / "rows.jsonl").write_text(rows)
    _, metrics = run_agent(
        tmp_path,
        f"agent:{sys.executable} {tmp_path / 'program.py'}",
        data_path=tmp_path / "rows.jsonl",
        steps=2,
        groups_per_step=2,
        group_size=2,
        async_ratio=0,
        over_sampling=1.5,
        env_timeout_s=60,
    )
    assert [line["response/turns_mean"] for line in metrics] == [2, 2]
