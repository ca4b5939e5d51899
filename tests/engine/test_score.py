"""Reward functions from a user's file: what they are given, what comes of what they return, and whose fault it is."""

import asyncio
import json
import os
import socket
import time
from pathlib import Path

import own_rewards
import pytest

from asyncrl.engine.reward_pool import RewardPool
from asyncrl.engine.reward_process import _why_no_namespaces
from asyncrl.engine.score import MAX_FAILURE, Failed, load_score

FILE = str(Path(__file__).with_name("own_rewards.py"))


def texts(*names: str) -> list[str]:
    return [f"{FILE}:{name}" for name in names]


def outcomes(
    functions: list[str], *responses: str, answer="4", timeout_s=1.0, num_processes=2
) -> list:
    """What becomes of each response, all asked for at once."""

    async def ask() -> list:
        rewards = RewardPool("addition", functions, timeout_s, num_processes)
        try:
            return await asyncio.gather(
                *(rewards.score(answer, r) for r in responses), return_exceptions=True
            )
        finally:
            rewards.close()

    return asyncio.run(ask())


ROW = json.dumps(
    {"answer": "4", "length": 7, "colour": "blue", "response": "the row's own", "prompt": "2 + 2"}
)


@pytest.mark.parametrize(
    ("function", "answer", "scored"),
    [
        ("exact", "4", (1.0, {})),
        ("exact", ROW, (1.0, {})),
        ("exact", '{"no": JSON', (0.0, {})),
        ("keywords", ROW, (4.0, {})),
        ("keywords", "4", (1.0, {})),
        ("by_columns", ROW, (8.0, {})),
        ("parts", ROW, (1.5, {"right": 1.0, "short": 0.5})),
        ("parts*2", ROW, (3.0, {"right": 1.0, "short": 0.5})),
        ("exact*-0.5", ROW, (-0.5, {})),
    ],
)
def test_a_function_is_given_the_columns_that_it_names_and_returns_a_number_or_its_parts(
    function, answer, scored
):
    assert load_score("addition", texts(function))(answer, "4") == scored


def test_several_functions_are_weighted_and_added_and_each_is_told_by_its_name():
    score = load_score("addition", texts("exact*2", "parts*0.5", "short"))
    parts = {"exact": 1.0, "parts": 1.5, "parts.right": 1.0, "parts.short": 0.5, "short": 1.0}
    assert score("4", "4") == (2 + 0.75 + 1, parts)


def test_without_a_function_the_task_scores():
    score = load_score("addition")
    assert score("a1 b2", "a 1 b 2") == (1.0, {}) and not score.is_async


def test_a_task_of_ones_own_scores_with_parts_and_its_failures_are_told_with_its_file():
    async def ask() -> list:
        rewards = RewardPool(texts("OwnTask")[0], [], 5.0, 1)
        asked = rewards.score("4", "4"), rewards.score("", "4")
        found = await asyncio.gather(*asked, return_exceptions=True)
        rewards.close()
        return found

    right, failed = asyncio.run(ask())
    line = own_rewards.OwnTask.score.__code__.co_firstlineno + 2
    assert right == (2.0, {"right": 1.0, "digits": 1.0})
    assert str(failed) == f"{FILE}:OwnTask.score, line {line}: ZeroDivisionError: division by zero"


@pytest.mark.parametrize("function", ["parts", "judge"])
def test_a_reward_and_its_parts_come_back_from_the_processes(function):
    scored = {"parts": (1.5, {"right": 1.0, "short": 0.5}), "judge": (2.0, {"wise": 2.0})}
    assert outcomes(texts(function), "4", "4", answer=ROW) == [scored[function]] * 2


def test_plain_and_async_functions_make_one_reward():
    parts = {"one_second": 4.0, "exact": 1.0, "judge": 2.0, "judge.wise": 2.0}
    assert outcomes(texts("one_second*0.25", "exact", "judge*3"), "4", timeout_s=5.0) == [
        (8.0, parts)
    ]


def test_256_async_rewards_of_one_second_each_wait_together():
    began = time.monotonic()
    responses = [str(i) for i in range(256)]
    found = outcomes(texts("one_second"), *responses, timeout_s=5.0, num_processes=4)
    assert found == [(float(i), {}) for i in range(256)]
    assert time.monotonic() - began < 6


def test_one_process_takes_async_rewards_on_while_others_wait():
    async def ask() -> float:
        rewards = RewardPool("addition", texts("one_second"), 5.0, 1)
        await rewards.score("", "0")
        began = time.monotonic()
        first = [asyncio.create_task(rewards.score("", str(i))) for i in range(2)]
        await asyncio.sleep(0.5)
        later = [asyncio.create_task(rewards.score("", str(i))) for i in range(64)]
        await asyncio.gather(*first, *later)
        rewards.close()
        return time.monotonic() - began

    assert asyncio.run(ask()) < 4, (
        "one after the other takes over a minute, batch after batch three seconds"
    )


BROKEN = [
    ("nan", "the reward is nan, not a finite number or a dict of them"),
    ("text", "the reward is '1.0', not a finite number or a dict of them"),
    ("list", "the reward is [1.0, 0.0], not a finite number or"),
    ("nothing", "the reward is None, not a finite number"),
    ("empty", "the reward is {}, not a finite number"),
    ("bad part", "the part 'wrong' is inf, not a finite number"),
    ("text part", "the part 'right' is '1.0', not a finite number"),
    ("bad name", "1 parts, [3]; allowed are 64 printable names"),
    ("long name", "printable names of at most 128 characters"),
    ("taken", "none of them mean, std, zero_variance_groups"),
    ("many", "1000 parts"),
    ("raise", "KeyError: 'no such key'"),
    ("surrogates", r"ValueError: \ud800\ud800"),
    ("large 13", "the reward is -1e+13, allowed is -1e+12 to 1e+12; scale it down"),
    ("large part 300", "the part 'large' is 1e+300, allowed is -1e+12 to 1e+12; scale it down"),
    ("exit", "SystemExit: 3"),
    ("leave", "its process died"),
    ("killed", "its process died"),
    ("hang", "timed out after 1 s"),
]


@pytest.mark.parametrize("name", ["broken", "broken_async"])
@pytest.mark.parametrize(("response", "reason"), BROKEN)
def test_a_bad_reward_fails_alone_and_is_told_with_its_file_and_function(name, response, reason):
    first, bad, last = outcomes(texts(name), "good", response, "good")
    assert first == last == (0.5, {})
    assert isinstance(bad, Failed) and "\n" not in str(bad)
    assert str(bad).startswith(texts(name)[0]) and reason in str(bad)
    line = own_rewards.broken.__code__.co_firstlineno + 26
    assert response != "raise" or f"{FILE}:{name}, line {line}: KeyError" in str(bad)
    assert len(str(bad).encode()) <= MAX_FAILURE


@pytest.mark.parametrize("function", ["broken", "broken_async"])
def test_a_reward_of_any_size_that_is_allowed_comes_back_and_a_sum_beyond_it_fails(function):
    assert outcomes(texts(function), "large 12") == [(-1e12, {})]
    (bad,) = outcomes(texts(f"{function}*2"), "large 12")
    assert isinstance(
        bad, Failed
    ) and "the sum of rewards is -2e+12, allowed is -1e+12 to 1e+12" in str(bad)


def test_an_async_reward_that_will_not_be_cancelled_costs_its_own_time_alone():
    *good, bad = outcomes(texts("broken_async"), *["good"] * 8, "deaf")
    assert (
        good == [(0.5, {})] * 8 and str(bad) == f"{texts('broken_async')[0]}: timed out after 1 s"
    )


def test_a_plain_function_that_fails_beside_an_async_one_fails_the_response():
    (bad,) = outcomes(texts("judge", "broken"), "nan")
    assert str(bad).startswith(texts("broken")[0])


@pytest.mark.skipif(bool(_why_no_namespaces()), reason="the kernel gives no namespaces here")
def test_async_functions_have_the_network_and_plain_ones_beside_them_have_none():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert outcomes(texts("broken_async"), f"connect {port}") == [(1.0, {})]
        (failed,) = outcomes(texts("connect", "judge"), port)
        assert "Network is unreachable" in str(failed)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (["/nowhere/at_all.py:score"], "at_all.py"),
        (texts("no_such_name"), "no_such_name"),
        (texts("number"), "is 3, not a function"),
        (texts("no_response"), "takes ['answer', 'completion'], and not `response`"),
        (texts("exact*heavy"), "the weight is 'heavy', not a finite number"),
        (texts("exact*nan"), "the weight is 'nan', not a finite number"),
        (texts("exact", "exact*2"), "would be reward/exact, as another metric; rename it"),
    ],
)
def test_what_is_no_reward_function_is_refused_in_one_line_before_a_process_starts(
    rewards, message
):
    with pytest.raises(ValueError) as refused:
        RewardPool("addition", rewards, 1.0, 2)
    assert (
        message in str(refused.value)
        and "\n" not in str(refused.value)
        and "--reward" in str(refused.value)
    )


def test_a_plain_reward_costs_little_more_than_its_own_time():
    """0.2 ms on an idle core; the bound leaves room for a busy one."""

    async def ask() -> float:
        rewards = RewardPool("addition", texts("parts"), 5.0, min(4, os.cpu_count() or 1))
        await asyncio.gather(*(rewards.score(ROW, "4") for _ in range(64)))
        began = time.monotonic()
        await asyncio.gather(*(rewards.score(ROW, "4") for _ in range(2000)))
        taken_s = time.monotonic() - began
        rewards.close()
        return taken_s / 2000

    assert asyncio.run(ask()) < 2e-3
