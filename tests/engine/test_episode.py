"""Trajectories of one and of several turns with scripted policies: real environments, no engine."""

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.engine.environments import EnvironmentPool, MultiTurn, SingleTurn, Step, call_in_thread
from asyncrl.engine.episode import Episode
from asyncrl.engine.score import Failed
from asyncrl.records import EVALUATION_GROUP, Completion, Ticket
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.environments import ENVIRONMENTS, TextEnvironment
from extras.baselines import BaselineEpisode
from extras.latency_law import LatencyLaw
from scripts.latency import Delayed

TOKENIZER = load_tokenizer(resolve_model("tiny", "guess_number"))
EOS = TOKENIZER.eos_token_id
ROOT = Path(__file__).parents[2]


def make_ticket(prompt_tokens=(), environment_seed=None, answer=""):
    return Ticket(7, 3, 1, 1, 0, prompt_tokens, answer, environment_seed, 123, 0)


def make_episode(environment, generate, ticket=None, **options):
    config = Config(
        **{"task": "guess_number", "max_prompt_tokens": 100, "max_response_tokens": 100, **options}
    )
    ticket = ticket or make_ticket(environment_seed=0)
    return Episode(config, ticket, 1, environment=environment, generate=generate)


def policy(*responses, version=5, cut=False):
    """A policy that says these things, turn by turn; the prompts it was given are kept."""
    prompts, left = [], list(responses)

    async def generate(request_id, prompt_tokens, seed, max_tokens, prefix):
        prompts.append(list(prompt_tokens))
        whole = TOKENIZER.encode(left.pop(0)) + ([] if cut else [EOS])
        tokens = whole[:max_tokens]
        reason = "length" if cut or tokens != whole else "stop"
        size = len(tokens)
        return Completion(
            tokens, np.full(size, -0.5, np.float32), np.full(size, version, np.int32), reason
        )

    generate.prompts = prompts
    return generate


def make_pool(make=lambda: ENVIRONMENTS["guess_number"](), timeout_s=5.0):
    return EnvironmentPool(make, TOKENIZER, timeout_s)


def secret_of(seed):
    """The number to be guessed, found by asking."""
    for guess in range(1, 200):
        environment = ENVIRONMENTS["guess_number"]()
        environment.reset(seed=seed)
        if environment.step(str(guess))[1] == 1.0:
            return guess
    raise AssertionError("no number is right")


def test_the_environments_tokens_stand_between_the_turns_and_are_not_trained_on():
    secret = secret_of(11)
    wrong = 1 if secret != 1 else 2
    generate = policy(str(wrong), str(secret))
    pool = make_pool()
    trajectory = asyncio.run(make_episode(MultiTurn(pool, 11), generate).run(worker=2))
    environment = ENVIRONMENTS["guess_number"]()
    first = pool.conversation.first(environment.reset(seed=11)[0])
    reply = pool.conversation.reply(environment.step(str(wrong))[0], ended=True)
    said = [[*TOKENIZER.encode(str(number)), EOS] for number in (wrong, secret)]
    assert trajectory.tokens.tolist() == [*first, *said[0], *reply, *said[1]]
    assert generate.prompts == [first, [*first, *said[0], *reply]]
    mask = (
        [False] * len(first) + [True] * len(said[0]) + [False] * len(reply) + [True] * len(said[1])
    )
    assert trajectory.loss_mask.tolist() == mask
    assert (trajectory.policy_versions == np.where(mask, 5, -1)).all()
    assert (trajectory.behavior_logprobs == np.where(mask, np.float32(-0.5), 0)).all()
    assert (trajectory.reward, trajectory.num_turns, trajectory.finish_reason) == (1.0, 2, "stop")
    assert len(trajectory.turns) == 2
    times = [
        trajectory.started_at,
        *(moment for turn in trajectory.turns for moment in turn),
        trajectory.ended_at,
    ]
    assert times == sorted(times)
    assert (trajectory.ticket_id, trajectory.group_id, trajectory.member, trajectory.worker) == (
        7,
        3,
        1,
        2,
    )


def test_a_turn_that_was_cut_is_closed_by_the_environments_tokens():
    secret = secret_of(11)
    generate = policy(str(secret + 1), str(secret), cut=True)
    asyncio.run(make_episode(MultiTurn(make_pool(), 11), generate).run(0))
    first, second = generate.prompts
    assert second[len(first) :].count(EOS) == 1


def test_a_trajectory_ends_when_its_tokens_are_used_up():
    generate = policy(*["1"] * 50)  # never right
    episode = make_episode(MultiTurn(make_pool(), 11), generate, max_response_tokens=5)
    trajectory = asyncio.run(episode.run(0))
    assert trajectory.finish_reason == "length" and trajectory.reward == 0.0
    assert len(trajectory.tokens) - len(generate.prompts[0]) <= 5 and trajectory.num_turns >= 1


@pytest.mark.parametrize(
    ("scheduling", "is_evaluation", "expected"),
    [
        ("queue", False, "reset act step act step"),
        ("lockstep", False, "reset wait act step wait act step"),
        ("batch", False, "reset act wait step act wait step"),
        ("lockstep", True, "reset act step act step"),
    ],
)
def test_a_baseline_waits_for_all_others_before_each_turn_or_before_each_step(
    scheduling, is_evaluation, expected
):
    did, say = [], policy("1", "2")

    class Counted:
        async def reset(self):
            did.append("reset")
            return [3]

        async def step(self, tokens):
            did.append("step")
            return Step([3], 0.0, ended=did.count("step") == 2)

    async def generate(*arguments):
        did.append("act")
        return await say(*arguments)

    async def wait():
        did.append("wait")

    ticket = replace(
        make_ticket(environment_seed=0), group_id=EVALUATION_GROUP if is_evaluation else 3
    )
    config = Config(scheduling=scheduling)
    episode = BaselineEpisode(config, ticket, 1, environment=Counted(), generate=generate)
    episode.wait_at_barrier = wait
    asyncio.run(episode.run(0))
    assert " ".join(did) == expected


class Answers:
    """Scores a response by how many characters it has, and remembers it."""

    async def score(self, answer, response):
        self.response = response
        return float(len(response)), {"length": 1.0}


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_response_that_goes_on_is_whole_in_its_trajectory_and_where_it_is_scored(has_ended):
    """With what there was before the run was resumed, which may be all of it but for its reward."""
    begun, rest = TOKENIZER.encode("12"), [*TOKENIZER.encode("34"), EOS]
    numbers = np.arange(len(begun), dtype=np.float32)
    reason = "stop" if has_ended else "aborted"
    partial = Completion(begun, -numbers, numbers.astype(np.int32), reason)
    given = []

    async def generate(request_id, prompt_tokens, seed, max_tokens, prefix):
        given.append((prompt_tokens, max_tokens, prefix.finish_reason))
        if has_ended:
            return prefix
        joined = (
            np.append(prefix.behavior_logprobs, [-9.0] * 3),
            np.append(prefix.policy_versions, [9] * 3),
        )
        return Completion(prefix.tokens + rest, *joined, "stop")

    ticket, rewards = replace(make_ticket((4, 5)), prefix=partial), Answers()
    episode = make_episode(
        SingleTurn(ticket, TOKENIZER, rewards), generate, ticket, task="addition"
    )
    trajectory = asyncio.run(episode.run(0))
    assert given == [((4, 5), 100, reason)]
    after = [] if has_ended else rest
    assert trajectory.tokens.tolist() == [4, 5, *begun, *after]
    assert trajectory.policy_versions.tolist() == [-1, -1, *range(len(begun)), *[9] * len(after)]
    assert trajectory.behavior_logprobs.tolist() == [0, 0, *-numbers, *[-9.0] * len(after)]
    assert (
        rewards.response == ("12" if has_ended else "1234") and trajectory.finish_reason == "stop"
    )
    assert (trajectory.num_turns, len(trajectory.turns)) == (1, 1)


class Broken(TextEnvironment):
    """Hangs or crashes in its first step."""

    max_turns, seed_shows = 3, False

    def __init__(self, crash):
        self.crash = crash

    def _start(self):
        return ENVIRONMENTS["guess_number"]().reset(seed=0)[0]

    def _act(self, response):
        if self.crash:
            raise KeyError("lost\nsecond line")
        threading.Event().wait()


@pytest.mark.parametrize(
    ("crash", "reason"),
    [(False, "timed out after 0.2 s"), (True, "KeyError: 'lost\\nsecond line'")],
)
def test_an_environment_that_hangs_or_crashes_fails_its_trajectory_and_stops_nobody(crash, reason):
    async def run_both():
        broken = make_episode(MultiTurn(make_pool(lambda: Broken(crash), 0.2), 0), policy("1"))
        sound = make_episode(MultiTurn(make_pool(), 11), policy(str(secret_of(11))))
        return await asyncio.gather(broken.run(0), sound.run(0))

    failed, sound = asyncio.run(run_both())
    assert (failed.finish_reason, failed.failure) == ("failed", reason) and np.isnan(failed.reward)
    assert sound.finish_reason == "stop" and sound.reward == 1.0


class Returning(TextEnvironment):
    """Returns what it is told to, or raises it."""

    max_turns, seed_shows = 3, False

    def __init__(self, reset=("higher", {}), step=("higher", 0.0, False, False, {})):
        self.answers = {"reset": reset, "step": step}

    def reset(self, *, seed=None, options=None):
        return self._answer("reset")

    def step(self, action):
        return self._answer("step")

    def _answer(self, method):
        answer = self.answers[method]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def stepped(observation="higher", reward=0.0, terminated=False, truncated=False):
    return {"step": (observation, reward, terminated, truncated, {})}


class Spoilt:
    def __repr__(self):
        return "<\ud800>"


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (
            {"step": ("higher", 0.0)},
            "step returned ('higher', 0.0), expected (observation, reward, terminated",
        ),
        ({"step": None}, "step returned None, expected (observation, reward"),
        ({"reset": "hi"}, "reset returned 'hi', expected (observation, info)"),
        (
            {"reset": ("higher", {}, 0)},
            "reset returned ('higher', {}, 0), expected (observation, info)",
        ),
        ({"reset": (None, {})}, "the observation is None, expected a str"),
        (stepped(observation=5), "the observation is 5, expected a str"),
        (
            stepped(observation="up\ud800"),
            r"the observation has '\ud800' at character 2, expected text without",
        ),
        (
            stepped(observation="higher" * 2_000_000),
            "the observation has 12000000 characters, at most 100000",
        ),
        (
            {"reset": ("higher" * 2_000_000, {})},
            "the observation has 12000000 characters, at most 100000 fit",
        ),
        (stepped(reward="1.0"), "the reward is '1.0', expected one finite number"),
        (stepped(reward=None), "the reward is None, expected one finite number"),
        (stepped(reward=np.ones(1)), "the reward is array([1.]), expected one finite number"),
        (
            stepped(reward=np.ones((2, 1))),
            "the reward is array([[1.], [1.]]), expected one finite number",
        ),
        (stepped(reward=float("nan")), "the reward is nan, expected one finite number"),
        (
            stepped(reward=float("inf"), terminated=True),
            "the reward is inf, expected one finite number",
        ),
        (stepped(reward=10**400), "the reward is 1000"),
        (stepped(terminated="False"), "terminated is 'False', expected True or False"),
        (stepped(truncated=None), "truncated is None, expected True or False"),
        ({"step": KeyboardInterrupt()}, "KeyboardInterrupt"),
        ({"reset": SystemExit(3)}, "SystemExit: 3"),
        ({"step": asyncio.CancelledError()}, "CancelledError"),
        ({"step": StopIteration()}, "StopIteration"),
        ({"step": TimeoutError("of its own")}, "TimeoutError: of its own"),
        ({"step": Unspeakable()}, "Unspeakable: <exception str() failed>"),
        ({"step": ValueError("\ud800" * 50)}, r"ValueError: \ud800\ud800"),
        ({"step": Spoilt()}, r"step returned <\ud800>, expected"),
        (stepped(reward=1e13), "the reward is 1e+13, allowed is -1e+12 to 1e+12; scale it down"),
        (stepped(reward=6e11), "the reward is 1.2e+12, allowed is -1e+12 to 1e+12"),
    ],
)
def test_an_environment_that_returns_or_raises_what_it_must_not_fails_its_trajectory_alone(
    answers, reason
):
    async def run_both():
        broken = make_episode(
            MultiTurn(make_pool(lambda: Returning(**answers), 60.0), 0), policy("1", "2")
        )
        sound = make_episode(MultiTurn(make_pool(), 11), policy(str(secret_of(11))))
        return await asyncio.wait_for(asyncio.gather(broken.run(0), sound.run(0)), 10)

    failed, sound = asyncio.run(run_both())
    assert failed.finish_reason == "failed" and np.isnan(failed.reward)
    assert (
        reason in failed.failure
        and "\n" not in failed.failure
        and len(failed.failure.encode()) <= 500
    )
    assert sound.finish_reason == "stop" and sound.reward == 1.0


@pytest.mark.parametrize(
    ("reward", "total"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.array(3.0), 3.0)],
)
def test_numpys_scalars_are_rewards_and_its_bools_end_an_episode_whatever_is_observed_then(
    reward, total
):
    pool = make_pool(lambda: Returning(**stepped(None, reward, np.bool_(False), np.bool_(True))))
    trajectory = asyncio.run(make_episode(MultiTurn(pool, 0), policy("1")).run(0))
    assert (trajectory.finish_reason, trajectory.reward, trajectory.num_turns) == ("stop", total, 1)
    assert type(trajectory.reward) is float


def test_an_environment_that_cannot_be_made_fails_its_trajectory():
    def make():
        raise OSError("no server")

    trajectory = asyncio.run(make_episode(MultiTurn(make_pool(make), 0), policy("1")).run(0))
    assert (trajectory.finish_reason, trajectory.failure) == ("failed", "OSError: no server")


def test_a_long_observation_is_tokenised_off_the_loop_under_the_time_limit():
    class Slow:
        """A conversation that takes long to tokenise what is observed."""

        end_of_turn = EOS

        def first(self, observation):
            threading.Event().wait()

    async def run():
        pool, ticks = make_pool(timeout_s=0.2), asyncio.create_task(asyncio.sleep(0.05))
        pool.conversation = Slow()
        trajectory = await make_episode(MultiTurn(pool, 0), policy("1")).run(0)
        assert ticks.done(), "the loop went on meanwhile"
        return trajectory

    assert asyncio.run(asyncio.wait_for(run(), 10)).failure == "timed out after 0.2 s"


def test_an_abort_ends_a_trajectory_in_the_middle_of_a_step_before_its_next_turn():
    async def abort_soon():
        generate = policy("1", "2")
        episode = make_episode(MultiTurn(make_pool(lambda: Broken(crash=False)), 0), generate)
        running = asyncio.create_task(episode.run(0))
        while not generate.prompts:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        episode.abort()
        return await asyncio.wait_for(running, 1), generate

    trajectory, generate = asyncio.run(abort_soon())
    assert trajectory.finish_reason == "aborted" and len(generate.prompts) == 1
    assert trajectory.num_generated == len(TOKENIZER.encode("1")) + 1, (
        "what was sampled is returned"
    )


def test_an_abort_before_the_first_turn_gives_an_empty_trajectory():
    async def abort_at_once():
        episode = make_episode(MultiTurn(make_pool(), 0), policy("1"))
        running = asyncio.create_task(episode.run(0))
        episode.abort()
        return await running

    assert asyncio.run(abort_at_once()).num_generated == 0


def test_an_environment_that_ended_is_used_again_and_one_that_failed_is_not():
    pool = make_pool(lambda: Broken(crash=True))
    asyncio.run(make_episode(MultiTurn(pool, 0), policy("1")).run(0))
    assert pool.idle == []
    pool = make_pool()
    first = MultiTurn(pool, 11)
    asyncio.run(make_episode(first, policy(str(secret_of(11)))).run(0))
    assert pool.take() is first.environment


class Rewards:
    """Scores by the length of the response, and fails where the answer says so."""

    async def score(self, answer, response):
        if answer == "fail":
            raise Failed("ValueError: no good")
        return float(len(response)), {"length": 1.0}


@pytest.mark.parametrize(
    ("answer", "reason", "reward"), [("", "stop", 1.0), ("fail", "failed", float("nan"))]
)
def test_a_single_turn_task_is_an_environment_of_one_step(answer, reason, reward):
    ticket = make_ticket(prompt_tokens=(4, 5, 6), answer=answer)
    environment = SingleTurn(ticket, TOKENIZER, Rewards())
    trajectory = asyncio.run(make_episode(environment, policy("7"), ticket, task="addition").run(0))
    assert trajectory.tokens[:3].tolist() == [4, 5, 6] and trajectory.loss_mask[:3].sum() == 0
    assert (trajectory.finish_reason, trajectory.num_turns) == (reason, 1)
    assert trajectory.reward == reward or np.isnan(reward)
    assert trajectory.reward_parts == ({"length": 1.0} if reason == "stop" else {})


class Instant:
    """An environment whose steps take no time."""

    async def reset(self):
        return [3]

    async def step(self, tokens):
        return "stepped"


def test_simulated_latency_is_scaled_and_waited_for_before_the_step():
    delayed = Delayed(Instant(), LatencyLaw.parse("constant:10 scale:0.02"), timeout_s=5.0, seed=0)
    start = time.monotonic()
    assert asyncio.run(delayed.step([1])) == "stepped"
    assert 0.2 <= time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("law", "reason"), [("fail:1", "crash|timed out"), ("constant:9", "timed out after 0.1 s")]
)
def test_simulated_failures_fail_as_real_ones_do(law, reason):
    delayed = Delayed(Instant(), LatencyLaw.parse(law), timeout_s=0.1, seed=0)
    with pytest.raises(Failed, match=reason):
        asyncio.run(delayed.step([1]))


def test_a_call_returns_raises_or_times_out_off_the_loop():
    async def calls():
        ticks = asyncio.create_task(asyncio.sleep(0.01))
        assert await call_in_thread(time.sleep, 0.1, timeout_s=5) is None
        assert ticks.done(), "the loop went on meanwhile"
        with pytest.raises(Failed, match="ZeroDivisionError: division by zero"):
            await call_in_thread(lambda: 1 / 0, timeout_s=5)
        with pytest.raises(Failed, match="SystemExit: 0"):
            await call_in_thread(sys.exit, 0, timeout_s=5)
        with pytest.raises(Failed, match=r"timed out after 0\.05 s"):
            await call_in_thread(threading.Event().wait, timeout_s=0.05)

    asyncio.run(calls())


HANGING = """
import asyncio, threading
from asyncrl.engine.environments import call_in_thread
asyncio.run(call_in_thread(threading.Event().wait, timeout_s=0.05))
"""


def test_a_call_that_hangs_keeps_no_process_from_its_end():
    ended = subprocess.run(
        [sys.executable, "-c", HANGING], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1 and "timed out after 0.05 s" in ended.stderr
