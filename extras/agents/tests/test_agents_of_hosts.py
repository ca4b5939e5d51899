"""What a remote host sends of its agents: every honest trajectory passes, and every lie about its segments is found."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from real_job import assert_ledger_balances, join_host, start_job
from speech import DROP
from test_agents_walk import Walk
from test_end_to_end_agents import BRANCHES, SIZES

trust = pytest.importorskip("extras.swarm.trust")
NEWEST = 10**6


def move_border(t):
    first, second, *rest = (*t.segment_lengths, 1)
    return {"segment_lengths": (first + 1, second - 1, *rest[:-1])}


def without_last(t):
    arrays = ("tokens", "loss_mask", "behavior_logprobs", "policy_versions")
    return {name: getattr(t, name)[:-1] for name in arrays}


LIES = [
    without_last,
    move_border,
    lambda t: {"segment_lengths": (0, *t.segment_lengths)},
    lambda t: {"num_turns": 9999},
    lambda t: {"policy_versions": np.where(t.loss_mask, NEWEST + 1, -1).astype(np.int32)},
    lambda t: {"turns": ((t.started_at, t.ended_at + 60, t.ended_at + 60),)},
]


class HostWalk(Walk):
    """The walk of a remote host, of which the run checks all that it sends."""

    def check(self, trajectory, episode, oracle):
        super().check(trajectory, episode, oracle)
        assert self.mistake(trajectory, episode) is None
        for lie in LIES if trajectory.segment_lengths else ():
            changed = replace(trajectory, **lie(trajectory))
            assert self.mistake(changed, episode) is not None

    def mistake(self, trajectory, episode):
        size = len(self.tokenizer)
        return trust.find_mistake(trajectory, episode.ticket, self.config, NEWEST, size)


def test_every_honest_agent_passes_and_each_lie_about_its_segments_is_found():
    asyncio.run(HostWalk(DROP, "resume").walk())


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
