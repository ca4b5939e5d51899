import pytest

from asyncrl.config import Config
from asyncrl.controller.prompts import PromptSource
from asyncrl.controller.tickets import IDS_PER_NODE
from asyncrl.records import Group
from data.problem import Problem
from extras.baselines import BaselineTickets


def make_source(seed=0, node=0, num_nodes=1, **options):
    prompts = PromptSource(
        train_problem=lambda index: Problem(f"p{index}", f"a{index}"),
        eval_problems=[Problem(f"e{i}", "x") for i in range(2)],
        encode=lambda problem: [len(problem.prompt), ord(problem.prompt[-1])],
    )
    return BaselineTickets(Config(seed=seed, group_size=3, **options), prompts, node, num_nodes)


def test_the_nodes_of_a_run_take_every_problem_once_with_ids_and_seeds_of_their_own():
    """The walk has what one node issues."""
    sources = [make_source(node=node, num_nodes=3) for node in range(3)]
    groups = [source.for_group(*source.next_group(), 5) for source in sources for _ in range(4)]
    assert [group[0].answer for group in groups[4:8]] == ["a1", "a4", "a7", "a10"]
    assert groups[4][0].group_id == IDS_PER_NODE
    tickets = [ticket for group in groups for ticket in group]
    assert len({t.answer for t in tickets}) == len({t.group_id for t in tickets}) == 12
    assert len({t.ticket_id for t in tickets}) == len({t.seed for t in tickets}) == 36
    assert all(0 <= t.seed < 2**31 for t in tickets)
    again, other = (make_source(seed).for_group(0, 0, 5) for seed in (0, 1))
    assert [t.seed for t in again] == [t.seed for t in groups[0]] != [t.seed for t in other]
    moved = tickets[0]
    for _ in range(2):
        moved = sources[0].issue_again(moved, counts_as_attempt=False)
    assert (moved.attempt, moved.seed) == (0, tickets[0].seed), "the walk has those that were lost"
    sources[1].put_back(1)
    assert [sources[1].next_group()[1] for _ in range(2)] == [1, 13]
    assert sources[1].answer(Group(4, (), problem=1)) == "a1"


def test_a_prompt_that_does_not_fit_and_is_met_later_ends_the_run():
    """job/test_node.py has those that are met before."""
    source = make_source(max_prompt_tokens=1)
    with pytest.raises(RuntimeError, match="has 2 tokens"):
        source.for_group(0, 0, 0)
