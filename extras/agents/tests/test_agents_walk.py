"""A random walk of hundreds of agents, whose trajectories an oracle computes from what the engine sampled."""

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from fake_engine import random_tokens
from speech import (
    DROP,
    KEEP,
    LETTERS,
    assert_trained_once,
    calls_of,
    make_ticket,
    make_tokenizer,
)
from test_agents import Room

from asyncrl.engine.rewards import Failed
from extras.agents.episode import AgentEpisode
from extras.agents.protocol import ChatRequest, RequestError

NUM_AGENTS, NUM_TOGETHER = 150, 50
LIMIT, CONTEXT = 24, 34
KINDS = {
    "new", "go on", "shorten", "edit", "again", "left", "hangs", "raises", "stopped at a text", "length", "stop",
    "failed", "context_length_exceeded", "max_response_tokens", "aborted",
}  # fmt: skip
"""What a walk has to have met."""


class Oracle:
    """What the prompt of each call of one trajectory must be, and how many segments its calls are."""

    def __init__(self, tokenizer, drops):
        self.tokenizer, self.drops = tokenizer, drops
        self.answered = []
        """Messages with the reply, tokens with those sampled, and the call's number, in the order of ends."""
        self.parents = {}
        self.asked = {}
        """Messages and number of each call."""
        self.wrong_prompts = []
        """Tokens of a prompt, and those that it must have. An error here would only refuse the call."""

    def listen(self, calls):
        """Check each call when it begins, and note the answer when it ends."""
        begin, answer = calls.begin_chat, calls.answer

        def begin_and_check(messages, tools):
            expected, parent = self.prompt(messages)
            call = begin(messages, tools)
            if call.tokens != expected:
                self.wrong_prompts.append((call.tokens, expected))
            number = len(self.asked)
            self.asked[call] = messages, number
            self.parents[number] = parent
            return call

        def answer_and_note(call, reply):
            answer(call, reply)
            messages, number = self.asked[call]
            history = [*messages, {"role": "assistant", "content": reply["content"]}]
            self.answered.append((history, [*call.tokens, *call.completion.tokens], number))

        calls.begin_chat, calls.answer = begin_and_check, answer_and_note

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def plain(self, messages):
        pieces = []
        for message in messages:
            content = message["content"]
            if message["role"] == "assistant":
                content = (content.split("c")[-1] if self.drops else content) + "<eos>"
            pieces.append(f"<{message['role']}>{content}")
        return "".join(pieces) + "<assistant>"

    def prompt(self, messages):
        """The tokens that a call must have, and the number of the call that it continues."""
        eos = self.encode("<eos>")
        for size in range(len(messages), 0, -1):
            for before, tokens, number in reversed(self.answered):
                if before != messages[:size] or (self.drops and "c" in before[-1]["content"]):
                    continue
                closing = [] if tokens[-1:] == eos else eos
                rest = self.plain(messages[size:])
                return [*tokens, *closing, *self.encode(rest)], number
        return self.encode(self.plain(messages)), None


class RandomAgent:
    """An agent that does anything: it goes on, branches, shortens and edits its history, calls at once, and hangs."""

    def __init__(self, rng, tokenizer, drops, seen):
        self.rng, self.seen = rng, seen
        self.oracle = Oracle(tokenizer, drops)
        self.histories = [[]]
        self.number = 0
        self.asked = []
        """Messages of each call that was sampled, in the order of their begin."""
        self.episode = None

    async def run(self, endpoint, key, problem):
        for _ in range(self.rng.randint(1, 7)):
            await asyncio.gather(*(self.call() for _ in range(self.rng.choice((1, 1, 1, 2, 3)))))
        ending = self.rng.random()
        if ending < 0.08:
            self.seen["hangs"] += 1
            await asyncio.Event().wait()
        if ending < 0.13:
            self.seen["raises"] += 1
            raise Failed("no good")
        return 0.5

    def next_messages(self):
        history = list(self.rng.choice(self.histories))
        kind = self.rng.choice(
            ("new", "go on", "go on", "go on", "shorten", "edit", "again", "too long")
        )
        if kind == "again" and self.asked:
            return list(self.rng.choice(self.asked))
        if kind == "new":
            history = [{"role": "system", "content": "s"}] * self.rng.randrange(2)
        elif kind == "shorten" and len(history) > 2:
            del history[self.rng.randrange(1, len(history)) :]
        elif kind == "edit" and history:
            place = self.rng.randrange(len(history))
            history[place] = {**history[place], "content": "ab"}
        elif kind == "too long" and self.rng.random() < 0.2:
            history.append({"role": "user", "content": "x" * CONTEXT})
        self.seen[kind] += 1
        self.number += 1
        return [*history, {"role": "user", "content": f"u{self.number}ab"}]

    async def call(self):
        messages = self.next_messages()
        stop = self.rng.choice(([], [], [], ["da"], ["b", "ab"], ["<eos>"]))
        request = ChatRequest(
            messages=messages, max_tokens=self.rng.choice((None, 1, 4)), stop=stop
        )
        call = self.episode.start_call(request)
        await asyncio.sleep(0)  # in which it begins
        begins = self.episode.calls._calls[-1]
        if self.rng.random() < 0.1:
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
            self.seen["left"] += not call.done()
            await self.episode.give_up(call)
        try:
            reply = (await asyncio.shield(call))["choices"][0]["message"]
        except RequestError as error:
            self.seen[error.body["error"]["code"] or "ended"] += 1
            return
        self.asked.append(messages)
        history = [*messages, {"role": "assistant", "content": reply["content"]}]
        self.histories.append(history)
        ends = [begins.said.find(text) for text in stop if text in begins.said]
        assert reply["content"] == begins.said[: min(ends, default=None)]
        self.seen["stopped at a text"] += bool(ends)


class Walk(Room):
    """Agents of one worker, over an engine that samples random letters through updates."""

    def __init__(self, template, on_update):
        self.rng, self.seen, self.num_trained = random.Random(0), Counter(), 0
        self.drops, tokenizer = template == DROP, make_tokenizer(template)
        letters = tokenizer.convert_tokens_to_ids([*LETTERS, "ab"])
        choose = random_tokens(self.rng, letters, tokenizer.eos_token_id)
        limits = {"max_prompt_tokens": CONTEXT - LIMIT, "max_response_tokens": LIMIT}
        limits |= {"env_timeout_s": 1.0, "on_update": on_update}
        super().__init__(choose=choose, template=template, **limits)

    async def walk(self):
        await self.proxy.load_weights(0, [{"version": 0}])
        updating = asyncio.create_task(self.update())
        ticket_ids = iter(range(1, NUM_AGENTS + 1))
        await asyncio.gather(*(self.run_some(ticket_ids) for _ in range(NUM_TOGETHER)))
        updating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await updating
        self.endpoint.close()
        sampled = self.proxy.take_sampled()
        assert sampled.new == self.engine.num_sampled == self.num_trained + sampled.discarded
        missing = KINDS - {kind for kind, count in self.seen.items() if count}
        assert not missing, "nothing of these kinds happened"

    async def update(self):
        for version in itertools.count(1):
            await asyncio.sleep(0.05)
            await self.proxy.load_weights(version, [{"version": version}])

    async def run_some(self, ticket_ids):
        for ticket_id in ticket_ids:
            agent = RandomAgent(self.rng, self.tokenizer, self.drops, self.seen)
            agents = replace(self.agents, agent=agent)
            ticket = make_ticket(ticket_id)
            episode = AgentEpisode(self.config, ticket, 0, agents=agents, proxy=self.proxy)
            agent.episode = episode
            agent.oracle.listen(episode.calls)
            self.check(await self.run_to_end(episode), episode, agent.oracle)

    async def run_to_end(self, episode):
        """The trajectory of an episode, which may be given up."""
        running = asyncio.create_task(episode.run(0))
        if self.rng.random() < 0.05:
            for _ in range(self.rng.randrange(30)):
                await asyncio.sleep(0)
            self.seen["aborted"] += not running.done()
            episode.abort()
        return await running

    def check(self, trajectory, episode, oracle):
        """The trajectory has what the engine sampled for its calls, up to the limit, and no segment too many."""
        self.seen[trajectory.finish_reason] += 1
        # an agent may raise anything, so an assertion within its calls only fails the trajectory
        assert "AssertionError" not in trajectory.failure, trajectory.failure
        assert not oracle.wrong_prompts, "what is read is what was sampled before"
        kept = [call for call in episode.calls._calls if call.completion is not None]
        # one that was given up while the engine was paused has never reached it
        sampled = calls_of(self.engine, trajectory.ticket_id, len(kept))
        cut = [
            (prompt, rows[: len(call.completion.tokens)])
            for call, (prompt, rows) in zip(kept, sampled, strict=True)
        ]
        assert_trained_once(trajectory, cut)
        assert trajectory.num_generated <= LIMIT
        self.num_trained += trajectory.num_generated
        assert trajectory.num_turns == sum(bool(rows) for _, rows in cut)
        numbers = {
            number
            for number, call in enumerate(episode.calls._calls)
            if call.completion is not None and call.completion.tokens
        }
        continued = {oracle.parents.get(number) for number in numbers} - {None}
        assert len(trajectory.segment_lengths) == len(numbers) - len(continued)


@pytest.mark.parametrize(
    ("template", "on_update"), [(KEEP, "keep"), (KEEP, "resume"), (DROP, "keep")]
)
def test_every_token_that_is_sampled_for_an_agent_is_trained_once_behind_what_the_engine_read(
    template, on_update
):
    """The fourth combination is in test_agents_of_hosts.py."""
    asyncio.run(Walk(template, on_update).walk())
