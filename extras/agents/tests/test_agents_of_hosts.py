"""What a remote host sends of its agents: every honest trajectory passes, and every lie about its segments is named."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from real_job import assert_ledger_balances, join_host, start_job
from speaking_engine import make_ticket
from test_agents import Inline, Room, shout, two_turns, user
from test_end_to_end_agents import BRANCHES, SIZES

from asyncrl.engine.score import Failed

trust = pytest.importorskip("extras.swarm.trust")
NEWEST = 3


async def branches(client):
    """Two turns, and two conversations at the same time."""
    ask = client.chat.completions.create
    alone = [ask(model="x", messages=[user(word)]) for word in ("bad", "cab")]
    await asyncio.gather(two_turns(client), *alone)
    return {"right": 1.0, "short": -0.5}


async def raises(client):
    await two_turns(client)
    raise Failed("no")


async def silent(client):
    raise Failed("no")


def move_border(t):
    first, second, *rest = t.segment_lengths
    return {"segment_lengths": (first + 1, second - 1, *rest)}


def without(t, place):
    """One token less."""
    arrays = ("tokens", "loss_mask", "behavior_logprobs", "policy_versions")
    return {name: np.delete(getattr(t, name), place) for name in arrays}


def late(t):
    return {"policy_versions": np.where(t.loss_mask, NEWEST + 1, -1).astype(np.int32)}


LIES = {
    "segments of": lambda t: without(t, -1),
    "segments of (0,": lambda t: {"segment_lengths": (0, len(t.tokens))},
    "a segment of": move_border,
    "1 segments, 9999 turns": lambda t: {
        "segment_lengths": (len(t.tokens),),
        "num_turns": 9999,
        "loss_mask": t.loss_mask & (np.arange(len(t.tokens)) == len(t.tokens) - 1),
    },
    "versions 4 … 4": late,
    "a time of": lambda t: {"turns": ((t.started_at, t.ended_at + 60, t.ended_at + 60),)},
}


@pytest.mark.parametrize(
    ("agent", "num_segments", "lies"),
    [(branches, 3, LIES), (two_turns, 1, {}), (raises, 1, {}), (silent, 0, {})],
)
def test_an_honest_agent_passes_and_each_lie_about_it_is_named(agent, num_segments, lies):
    room = Room(shout)
    (trajectory,) = room.run(Inline(agent))
    assert len(trajectory.segment_lengths) == num_segments
    ticket, vocab_size = make_ticket(trajectory.ticket_id), len(room.tokenizer)

    def mistake(changes):
        changed = replace(trajectory, **changes)
        return trust.mistake_in(changed, ticket, room.config, NEWEST, vocab_size)

    assert mistake({}) is None
    for named, lie in lies.items():
        assert mistake(lie(trajectory)).startswith(named)


HOST = """
import os, sys
sys.path.insert(0, os.getcwd())
import rollout

if __name__ == "__main__":
    os.chdir("{folder}")  # that of user code
    rollout.main()
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_a_host_that_joins_runs_agents_and_what_it_sends_is_what_the_trainer_scores(tmp_path):
    (tmp_path / "branches.py").write_text(BRANCHES)
    task = f"agent:{tmp_path / 'branches.py'}:run"
    options = {"listen": "127.0.0.1:0", "num_rollout_workers": 0, "swarm.verify_share": 1}
    job = start_job(tmp_path, task=task, steps=3, async_ratio=0, eval_every=0, **SIZES, **options)
    program = tmp_path / "host.py"
    program.write_text(HOST.format(folder=job.run_path / "code"))
    host = join_host(job, str(program))
    assert job.wait() == 0, job.output()[-3000:]
    assert host.wait(timeout_s=30) == 0
    (*_, last) = job.metrics()
    assert last["swarm/verified"] > 0
    assert last["swarm/verify_failed"] == last["swarm/shut_out"] == 0
    assert_ledger_balances(job.metrics())
