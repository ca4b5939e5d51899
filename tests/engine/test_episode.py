"""Trajectories of one and of several turns with scripted policies and environments: no engine."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import wait_until

from asyncrl.config import Config
from asyncrl.engine.environments import SingleTurn
from asyncrl.engine.episode import Episode
from asyncrl.records import EVALUATION_GROUP, GREEDY_GROUP, Completion, Ticket
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.environments import GuessNumber
from extras.environments.multi_turn import EnvironmentPool, MultiTurn

TOKENIZER = load_tokenizer(resolve_model("tiny", "guess_number"))
EOS = TOKENIZER.eos_token_id
TICKET = Ticket(7, 3, 1, 1, 0, (4, 5), "", 0, 123, 0)
FIRST = GuessNumber.INSTRUCTION


class Scripted:
    """Gives its answers in turn: one that is an exception is raised, and a function is called."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.is_closed = False

    def close(self):
        self.is_closed = True

    def reset(self, *, seed):
        return self.step("")

    def step(self, action):
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer


def stepped(observation="higher", reward=0.0, terminated=False, truncated=False):
    return observation, reward, terminated, truncated, {}


def make_episode(environment, *responses, ticket=TICKET, **options):
    """An episode with a policy that says these things, turn by turn; `calls` has what it was given.

    A response is a text and whether it is cut, without its end.
    """
    left, calls = list(responses), []

    async def generate(request_id, prompt_tokens, seed, max_tokens, prefix):
        calls.append((request_id, list(prompt_tokens), seed, max_tokens, prefix))
        text, is_cut = left.pop(0)
        whole = TOKENIZER.encode(text) + [EOS] * (not is_cut)
        tokens = whole[:max_tokens]
        turn = len(calls)
        return Completion(
            tokens,
            "length" if is_cut or tokens != whole else "stop",
            behavior_logprobs=np.full(len(tokens), -turn, np.float32),
            policy_versions=np.full(len(tokens), turn, np.int32),
        )

    limits = {"max_prompt_tokens": 100, "max_response_tokens": 100}
    config = Config(**{"task": "guess_number", **limits, **options})
    episode = Episode(config, ticket, 1, environment=environment, generate=generate)
    episode.calls = calls
    return episode


class ScriptedPool(EnvironmentPool):
    """A pool that notes what it made."""

    def __init__(self, make, timeout_s):
        self.made = []
        super().__init__(lambda: self.note(make()), TOKENIZER, timeout_s)

    def note(self, environment):
        self.made.append(environment)
        return environment


def make_pool(*answers, timeout_s=5.0):
    return ScriptedPool(lambda: Scripted(*answers), timeout_s)


REWARDS = (0, True, 0.25, np.float32(0.5), np.array(3.0))


@settings(deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.integers(1, 31).map(str),
            st.booleans(),
            st.sampled_from([GuessNumber.HIGHER, GuessNumber.LOWER, FIRST]),
            st.sampled_from(REWARDS),
        ),
        min_size=1,
        max_size=4,
    ),
    limit=st.integers(1, 40),
    turn_limit=st.none() | st.integers(1, 4),
    terminated=st.booleans(),
    group_id=st.sampled_from([3, EVALUATION_GROUP, GREEDY_GROUP]),
)
def test_a_trajectory_is_what_policy_and_environment_said_in_turn(
    turns, limit, turn_limit, terminated, group_id
):
    """Turns are a text, whether it is cut, what is observed then, and the reward."""
    answers = [stepped(observation, reward, np.bool_(False)) for _, _, observation, reward in turns]
    last_observation = turns[-1][2] if terminated else None
    answers[-1] = stepped(last_observation, turns[-1][3], terminated, np.bool_(not terminated))
    pool = make_pool((FIRST, {}), *answers)
    ticket = replace(TICKET, group_id=group_id)
    responses = [turn[:2] for turn in turns]
    episode = make_episode(
        MultiTurn(pool, 11),
        *responses,
        ticket=ticket,
        max_response_tokens=limit,
        max_turn_tokens=turn_limit,
    )
    trajectory = asyncio.run(episode.run(0))

    tokens = pool.conversation.first(FIRST)
    versions, calls, total, end = [-1] * len(tokens), [], 0.0, len(tokens) + limit
    for turn, (text, is_cut, observation, reward) in enumerate(turns):
        seed = None if group_id == GREEDY_GROUP else 123 + turn * 65536
        most = min(end - len(tokens), turn_limit or limit)
        calls.append((f"7.{turn}", list(tokens), seed, most, None))
        whole = TOKENIZER.encode(text) + [EOS] * (not is_cut)
        response = whole[:most]
        tokens += response
        versions += [turn + 1] * len(response)
        total += float(reward)
        reason = "length" if is_cut or response != whole else "stop"
        if turn == len(turns) - 1:
            break
        reply = pool.conversation.reply(observation, ended=response[-1] == EOS)
        if len(tokens) + len(reply) >= end:
            reason = "length"
            break
        tokens += reply
        versions += [-1] * len(reply)
    assert episode.calls == calls
    assert trajectory.tokens.tolist() == tokens
    assert trajectory.policy_versions.tolist() == versions
    assert trajectory.loss_mask.tolist() == [version > 0 for version in versions]
    assert trajectory.behavior_logprobs.tolist() == [-max(version, 0) for version in versions]
    assert type(trajectory.reward) is float and trajectory.reward == total
    assert (trajectory.finish_reason, trajectory.num_turns) == (reason, len(calls))
    turns_played = turns[: len(calls)]
    assert trajectory.turn_rewards == tuple(float(turn[3]) for turn in turns_played)
    has_text = len(calls) < len(turns) or last_observation is not None
    assert trajectory.last_observation == (turns_played[-1][2] if has_text else "")
    moments = [moment for times in trajectory.turns for moment in times]
    times = [trajectory.started_at, *moments, trajectory.ended_at]
    assert len(moments) == 3 * len(calls) and times == sorted(times)
    assert len(pool.idle) == 1, "one whose episode ended is used again, also if it was cut"


def hang():
    threading.Event().wait()


LARGE = "higher" * 2_000_000
BAD_RESETS = [
    ("hi", "reset returned 'hi', expected (observation, info)"),
    (SystemExit(3), "SystemExit: 3"),
    (hang, "timed out after 0.5 s"),
    ((FIRST * 100, {}), "tokens, --max-prompt-tokens is 100; raise it"),
]
BAD_STEPS = [
    (("higher", 0.0), "step returned ('higher', 0.0), expected (observation, reward, terminated"),
    (stepped(observation=5), "the observation is 5, expected a str"),
    (stepped("up\ud800"), r"the observation has '\ud800' at character 2, expected text without"),
    (stepped(LARGE), "the observation has 12000000 characters, at most 100000"),
    (stepped(reward="1.0"), "the step's reward is '1.0', not a finite number"),
    (stepped(reward=6e11), "the sum of rewards is 1.2e+12, allowed is -1e+12 to 1e+12"),
    (stepped(terminated="False"), "terminated is 'False', expected True or False"),
    (asyncio.CancelledError(), "CancelledError"),
    (TimeoutError("of its own"), "TimeoutError: of its own"),
    (KeyError("lost\nsecond line"), r"KeyError: 'lost\nsecond line'"),
    (hang, "timed out after 0.5 s"),
]


def test_an_environment_that_hangs_raises_or_returns_nonsense_fails_its_trajectory_alone():
    scripts = [([reset], reason) for reset, reason in BAD_RESETS]
    scripts += [([(FIRST, {}), step, step], reason) for step, reason in BAD_STEPS]
    pools = [make_pool(*answers, timeout_s=0.5) for answers, _ in scripts]

    def refuse():
        raise OSError("no server")

    pools.append(ScriptedPool(refuse, 0.5))
    reasons = [reason for _, reason in scripts] + ["OSError: no server"]
    pools.append(make_pool((FIRST, {}), stepped(reward=1.0), stepped(reward=1.0, truncated=True)))
    responses = [("1", False)] * 2

    async def run_all():
        episodes = [make_episode(MultiTurn(pool, 0), *responses) for pool in pools]
        return await asyncio.gather(*(episode.run(0) for episode in episodes))

    *failed, sound = asyncio.run(run_all())
    for trajectory, reason in zip(failed, reasons, strict=True):
        assert trajectory.finish_reason == "failed" and np.isnan(trajectory.reward)
        failure = trajectory.failure
        assert reason in failure and "\n" not in failure and len(failure.encode()) <= 500
    assert all(not pool.idle for pool in pools[:-1])
    made = [environment for pool in pools for environment in pool.made]
    closed = [True] * (len(made) - 1) + [False]
    wait_until(lambda: [environment.is_closed for environment in made] == closed)
    pools[-1].close()
    wait_until(lambda: made[-1].is_closed)
    hanging = [thread for thread in threading.enumerate() if thread.name == "environment"]
    assert hanging and all(thread.daemon for thread in hanging), "they keep no process from its end"
    assert (sound.finish_reason, sound.reward) == ("stop", 2.0)


@pytest.mark.parametrize("num_turns", [0, 1])
def test_an_abort_ends_a_trajectory_before_its_first_turn_or_in_the_middle_of_a_step(num_turns):
    async def abort_soon():
        pool = make_pool((FIRST, {}), hang, timeout_s=60.0)
        episode = make_episode(MultiTurn(pool, 0), ("1", False))
        running = asyncio.create_task(episode.run(0))
        while len(episode.placed_completions) < num_turns:
            await asyncio.sleep(0.01)
        episode.abort()
        ended, _ = await asyncio.wait({running}, timeout=10)
        assert ended, "the step is not waited for"
        return await running

    trajectory = asyncio.run(abort_soon())
    assert trajectory.finish_reason == "aborted"
    assert trajectory.num_generated == num_turns * 2, "what was sampled is returned"


SAID = [(("12<pad>", False), "12<pad>"), (("<pad>3<eos>", True), "<pad>3<eos>")]
"""What is sampled, and whether it is cut, as in make_episode; and the text of it."""


@pytest.mark.parametrize(("response", "text"), SAID)
def test_rewards_and_environments_get_the_whole_text_but_for_the_token_that_stopped_it(
    response, text
):
    """Special tokens stay, and so does the last token of a response that was cut."""
    seen = []

    async def score(answer, response):
        seen.append(response)
        return 0.0, {}

    class Noting(Scripted):
        def step(self, action):
            seen.append(action)
            return super().step(action)

    single = SingleTurn(TICKET, TOKENIZER, SimpleNamespace(score=score))
    pool = EnvironmentPool(lambda: Noting((FIRST, {}), stepped(terminated=True)), TOKENIZER, 5.0)
    for environment in (single, MultiTurn(pool, 0)):
        trajectory = asyncio.run(make_episode(environment, response).run(0))
        generated = trajectory.tokens[trajectory.loss_mask].tolist()
        whole = TOKENIZER.encode(response[0]) + [EOS] * (not response[1])
        assert generated == whole, "the token that stopped it is trained"
    assert [action.replace(" ", "") for action in seen if action] == [text, text]


def test_a_task_of_one_turn_scores_the_whole_response():
    async def score(answer, response):
        return float((answer, response) == ("six", "12")), {"length": 1.0}

    ticket = replace(TICKET, answer="six")
    environment = SingleTurn(ticket, TOKENIZER, SimpleNamespace(score=score))
    episode = make_episode(environment, ("12", False), ticket=ticket, task="addition")
    trajectory = asyncio.run(episode.run(0))
    assert trajectory.tokens.tolist() == [4, 5, *TOKENIZER.encode("12"), EOS]
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"length": 1.0})
