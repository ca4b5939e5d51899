"""Lengths of the workloads, and what rollout does with recorded or synthetic tokens."""

from types import SimpleNamespace

from trajectories import make_trajectory

from asyncrl.config import Config
from asyncrl.controller.prompts import PromptSource
from data.problem import Problem
from extras.baselines import BaselineTickets
from scripts.bench import rollout, workloads
from scripts.bench.workloads import WORKLOADS


def test_one_request_for_a_group_has_the_lengths_of_its_members_tickets():
    tickets = {}
    for is_replicated in (True, False):
        config = Config(max_response_tokens=192, replicate_prompts=is_replicated)
        prompts = PromptSource(lambda index: Problem("p", "a"), [], lambda problem: [1])
        source = BaselineTickets(config, prompts)
        source.next_group()
        tickets[is_replicated] = source.for_group(*source.next_group(), 0)
    lengths = workloads.member_lengths(config, 1)
    assert [WORKLOADS["tail"].length(ticket.seed) for ticket in tickets[True]] == lengths
    assert [t.num_members for t in tickets[False]] == [len(lengths)] and len(set(lengths)) > 1


def test_vllm_gives_each_response_of_one_request_its_length(monkeypatch):
    from vllm import SamplingParams
    from vllm.v1.engine.parallel_sampling import ParentRequest

    name = "_get_child_sampling_params"
    monkeypatch.setattr(ParentRequest, name, getattr(ParentRequest, name))  # undone after the test
    workloads.force_member_lengths({5: [3, 1, 2]})
    params = SamplingParams(n=3, seed=5, max_tokens=192)
    request = ParentRequest(SimpleNamespace(request_id="r", external_req_id="r", params=params))
    assert [request.get_child_info(index)[1].max_tokens for index in range(3)] == [3, 1, 2]


# Rollout


def test_recomputed_tokens_are_those_before_each_change_of_version_with_the_prompt():
    assert rollout.recomputed_tokens(make_trajectory(0, 0, versions=(0, 0, 1, 1, 3))) == 3 + 5
