"""Agents of the real engine, whose turns live through updates: the trainer scores what the engine sampled.

They are slow, as test_agents_walk.py has the same with an engine that is made up.
"""

import asyncio
import contextlib

import numpy as np
import pytest
from engine_pair import start_pair
from speaking_engine import make_ticket
from test_agents import Inline, user
from tiny_policy import save_byte_llama

from asyncrl.config import Config
from asyncrl.weights.models import load_tokenizer
from extras.agents.endpoint import Endpoint
from extras.agents.episode import AgentEpisode, Agents
from extras.agents.replies import Replies
from extras.agents.template import Template

pytestmark = pytest.mark.slow
NUM_AGENTS, NUM_UPDATES, NUM_TURNS, MAX_TURN = 8, 4, 3, 50
"""The last is the most tokens of a turn."""


async def converse(client):
    """Three turns, and a branch that leaves the second one out."""
    messages = []
    for number in range(NUM_TURNS):
        messages.append(user(f"turn {number}"))
        answer = await client.chat.completions.create(
            model="x", messages=messages, max_tokens=MAX_TURN
        )
        messages.append(answer.choices[0].message)
    shortened = [*messages[:2], user("again")]
    await client.chat.completions.create(model="x", messages=shortened, max_tokens=MAX_TURN)
    return 1.0


async def run_through_updates(pair, weights):
    """The trajectories of agents; `weights` gets those of each version."""
    config, tokenizer = pair.proxy.config, load_tokenizer(pair.config.model)
    agents = Agents(
        Inline(converse),
        Endpoint(config),
        Template(tokenizer, []),
        Replies(config, tokenizer),
        float,
        None,
    )
    serving = asyncio.create_task(agents.endpoint.serve())
    running = [
        asyncio.create_task(
            AgentEpisode(config, make_ticket(number), 0, agents=agents, proxy=pair.proxy).run(0)
        )
        for number in range(NUM_AGENTS)
    ]
    for _ in range(NUM_UPDATES):
        await pair.until_grown(8, running)
        pair.perturb()
        version = pair.proxy.version + 1
        weights[version] = pair.weights()
        await pair.proxy.update(version, pair.stage(version).messages)
    trajectories = await asyncio.gather(*running)
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    return trajectories


def turns_of(trajectory):
    """Tokens before and of each turn, and the turn's log-probs and versions."""
    for segment in trajectory.segments:
        tokens, mask = trajectory.tokens[segment], trajectory.loss_mask[segment].astype(int)
        changes = np.diff(mask, prepend=0, append=0)
        ends = np.flatnonzero(changes == -1)
        for start, end in zip(np.flatnonzero(changes == 1), ends, strict=True):
            columns = trajectory.behavior_logprobs, trajectory.policy_versions
            yield tokens[:start], tokens[start:end], *(c[segment][start:end] for c in columns)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model = save_byte_llama(str(tmp_path_factory.mktemp("model")))
    sizes = {"max_prompt_tokens": 100, "max_response_tokens": (NUM_TURNS + 1) * MAX_TURN}
    with start_pair(Config(model=model, lr=1e-3, **sizes)) as pair:
        yield pair


@pytest.mark.parametrize("mode", ["keep", "resume"])
def test_every_token_of_a_turn_that_an_update_meets_is_what_its_version_would_have_sampled(
    pair, mode
):
    weights = {pair.proxy.version: pair.weights()}
    with pair.options(on_update=mode):
        trajectories = pair.run(run_through_updates(pair, weights))
    assert all(trajectory.reward == 1.0 for trajectory in trajectories)
    num_mixed, gaps, gaps_behind = 0, [], []
    for trajectory in trajectories:
        assert len(trajectory.segment_lengths) == 2 and trajectory.num_turns == NUM_TURNS + 1
        for prompt, tokens, logprobs, versions in turns_of(trajectory):
            num_mixed += len(set(versions)) > 1
            for version in sorted(set(versions)):
                pair.restore(weights[version])
                gap = np.abs(logprobs - pair.trainer_logprobs(prompt, tokens))[versions == version]
                is_behind = mode == "keep" and version > versions[0]
                (gaps_behind if is_behind else gaps).append(gap)
    assert num_mixed >= NUM_AGENTS
    assert np.concatenate(gaps).max() < 1e-4
    if mode == "keep":  # the keys and values of the weights before are attended to
        assert np.concatenate(gaps_behind).mean() > 1e-3
