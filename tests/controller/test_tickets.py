from dataclasses import replace

import pytest

from asyncrl.config import Config
from asyncrl.controller.tickets import IDS_PER_NODE, PromptSource
from asyncrl.records import EVALUATION_GROUP, GREEDY_GROUP, Group
from data.problem import Problem
from extras.baselines import BaselineTickets


def make_source(seed=0, eval_problems=2, node=0, num_nodes=1, **options):
    prompts = PromptSource(
        train_problem=lambda index: Problem(f"p{index}", f"a{index}"),
        eval_problems=[Problem(f"e{i}", "x") for i in range(eval_problems)],
        encode=lambda problem: [len(problem.prompt), ord(problem.prompt[-1])],
    )
    return BaselineTickets(Config(seed=seed, group_size=3, **options), prompts, node, num_nodes)


def test_a_groups_tickets_share_the_prompt_and_differ_in_member_id_and_seed():
    tickets = make_source().for_group(0, 0, min_version=4)
    assert [t.member for t in tickets] == [0, 1, 2]
    assert len({t.prompt_tokens for t in tickets}) == 1 and {t.min_version for t in tickets} == {4}
    assert len({t.ticket_id for t in tickets}) == len({t.seed for t in tickets}) == 3


def test_seeds_depend_on_run_seed_group_member_and_attempt_and_on_nothing_else():
    first, same, other = (make_source(seed).for_group(7, 0, 0) for seed in (0, 0, 1))
    assert [t.seed for t in first] == [t.seed for t in same]
    assert not {t.seed for t in first} & {t.seed for t in other}
    assert all(0 <= t.seed < 2**31 for t in first)


def test_a_lost_response_keeps_its_seed_until_it_is_lost_twice_with_workers_of_this_node():
    source = make_source()
    ticket = source.for_group(7, 0, 0)[0]
    tickets = [ticket]
    for why in ("moved", "died", "died", "died", "moved"):
        tickets.append(source.issue_again(tickets[-1], why))
    assert [t.attempt for t in tickets] == [0, 0, 1, 2, 3, 3]
    assert len({t.ticket_id for t in tickets}) == 6
    seeds = [t.seed for t in tickets]
    assert seeds[0] == seeds[1] == seeds[2] and seeds[4] == seeds[5] and len(set(seeds)) == 3


def test_problems_come_in_order_and_a_dropped_groups_problem_can_come_again():
    source = make_source()
    assert [source.next_group() for _ in range(3)] == [(0, 0), (1, 1), (2, 2)]
    source.put_back(1)
    assert [source.next_group() for _ in range(2)] == [(3, 1), (4, 3)]
    assert {ticket.answer for ticket in source.for_group(4, 3, 0)} == {"a3"}
    assert source.answer(Group(4, (), problem=3)) == "a3"


def test_without_replication_one_ticket_asks_for_the_whole_group():
    (ticket,) = make_source(replicate_prompts=False).for_group(0, 0, 0)
    assert (ticket.member, ticket.num_members) == (0, 3)


def test_extra_members_have_tickets_of_their_own():
    tickets = make_source(extra_members=2).for_group(0, 0, 0)
    assert [t.member for t in tickets] == [0, 1, 2, 3, 4] and {t.num_members for t in tickets} == {
        1
    }


def test_evaluations_at_different_versions_draw_differently_and_never_enter_a_group():
    source = make_source()
    first, second = source.for_evaluation(0), source.for_evaluation(10)
    assert {t.group_id for t in first + second} == {EVALUATION_GROUP}
    assert not {t.seed for t in first} & {t.seed for t in second}


def test_an_evaluation_may_ask_each_problem_twice_the_second_time_greedily():
    once, twice = make_source().for_evaluation(3), make_source(eval_greedy=True).for_evaluation(3)
    assert [t.group_id for t in twice] == [EVALUATION_GROUP] * len(once) + [GREEDY_GROUP] * len(
        once
    )
    assert [t.prompt_tokens for t in twice] == 2 * [t.prompt_tokens for t in once]
    assert all(t.is_evaluation for t in twice) and len({t.ticket_id for t in twice}) == len(twice)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_starts():
    with pytest.raises(
        ValueError, match="has 2 tokens, --max-prompt-tokens is 1; raise it to at least 2"
    ):
        make_source(max_prompt_tokens=1).check_prompts()


def test_of_prompts_that_do_not_fit_the_longest_is_named_with_the_length_that_would_do():
    lengths = lambda problem: [0] * (9 if problem.prompt == "p77" else 5)  # noqa: E731
    source = make_source(max_prompt_tokens=4)
    source.prompts = replace(source.prompts, encode=lengths)
    with pytest.raises(
        ValueError, match=r"has 9 tokens, .* raise it to at least 9\. The prompt begins 'p77'"
    ):
        source.check_prompts()


def test_the_nodes_of_a_run_take_every_problem_once_with_ids_and_seeds_of_their_own():
    sources = [make_source(node=node, num_nodes=3) for node in range(3)]
    groups = [source.for_group(*source.next_group(), 0) for source in sources for _ in range(4)]
    assert sorted(group[0].answer for group in groups) == sorted(f"a{index}" for index in range(12))
    assert [group[0].answer for group in groups[4:8]] == ["a1", "a4", "a7", "a10"]
    tickets = [ticket for group in groups for ticket in group]
    assert len({t.group_id for t in tickets}) == 12
    assert len({t.ticket_id for t in tickets}) == len({t.seed for t in tickets}) == 36
    assert groups[4][0].group_id == IDS_PER_NODE
    sources[1].put_back(1)
    assert sources[1].next_group() == (IDS_PER_NODE + 4, 1)
