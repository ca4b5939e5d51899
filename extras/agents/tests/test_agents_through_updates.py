"""Agents of the real engine, whose turns live through updates: the trainer scores what the engine sampled.

They are slow, as test_agents_walk.py has the same with an engine that is made up.
"""

import numpy as np
import pytest
from engine_pair import start_pair
from speech import make_ticket
from test_agents import Inline, user
from tiny_policy import save_byte_llama

from asyncrl.config import Config
from asyncrl.records import Completion, slice_columns
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


def start_agents(agents, proxy):
    """Coroutines of the trajectories of agents."""
    tickets = map(make_ticket, range(NUM_AGENTS))
    return [
        AgentEpisode(proxy.config, ticket, 0, agents=agents, proxy=proxy).run(0)
        for ticket in tickets
    ]


def turns_of(trajectory):
    """The prompt of each turn, which is all before it, and the turn."""
    for segment in trajectory.segments:
        tokens, mask = trajectory.tokens[segment], trajectory.loss_mask[segment].astype(int)
        changes = np.diff(mask, prepend=0, append=0)
        ends = np.flatnonzero(changes == -1)
        for start, end in zip(np.flatnonzero(changes == 1), ends, strict=True):
            places = slice(segment.start + start, segment.start + end)
            columns = slice_columns(trajectory, places)
            yield tokens[:start], Completion(tokens[start:end], "", **columns)


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
    config, tokenizer = pair.proxy.config, load_tokenizer(pair.config.model)
    shared = Endpoint(config), Template(tokenizer, []), Replies(config, tokenizer), float, None
    agents = Agents(Inline(converse), *shared)
    serving = pair.loop.create_task(agents.endpoint.serve())
    with pair.options(on_update=mode):
        trajectories, weights = pair.run_through_updates(
            lambda: start_agents(agents, pair.proxy), NUM_UPDATES
        )
    serving.cancel()
    assert all(trajectory.reward == 1.0 for trajectory in trajectories)
    num_mixed, gaps, gaps_behind = 0, [], []
    for trajectory in trajectories:
        assert len(trajectory.segment_lengths) == 2 and trajectory.num_turns == NUM_TURNS + 1
        for prompt, turn in turns_of(trajectory):
            versions = turn.policy_versions
            num_mixed += len(set(versions)) > 1
            gap = pair.gaps(turn, weights, prompt)
            is_behind = (versions > versions[0]) & (mode == "keep")
            gaps.append(gap[~is_behind])
            gaps_behind.append(gap[is_behind])
    assert num_mixed >= NUM_AGENTS
    assert np.concatenate(gaps).max() < 1e-4
    if mode == "keep":  # the keys and values of the weights before are attended to
        assert np.concatenate(gaps_behind).mean() > 1e-3
