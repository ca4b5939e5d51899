"""A random walk of a thousand agents, whose trajectories an oracle computes from what the engine sampled."""

import asyncio
import contextlib
import random
from collections import Counter

import pytest
from fake_engine import (
    DROP,
    KEEP,
    LETTERS,
    SamplingEngine,
    assert_trained_once,
    calls_of,
    make_ticket,
    make_tokenizer,
)

from asyncrl.config import Config
from asyncrl.engine.proxy import LLMProxy
from extras.agents.endpoint import Endpoint
from extras.agents.episode import AgentEpisode, Agents
from extras.agents.protocol import ChatRequest, RequestError
from extras.agents.replies import Replies
from extras.agents.template import Template

NUM_AGENTS, NUM_TOGETHER = 1000, 50
LIMIT, CONTEXT = 24, 34


class Oracle:
    """What the prompt of each call of one trajectory must be, and how many segments its calls are."""

    def __init__(self, tokenizer, drops):
        self.tokenizer, self.drops = tokenizer, drops
        self.answered = []
        """Messages with the reply, tokens with those sampled, and the call's number, in the order of ends."""
        self.parents = {}
        self.asked = {}
        """Messages and number of each call."""

    def listen(self, calls):
        """Check each call when it begins, and note the answer when it ends."""
        begin, answer = calls.begin_chat, calls.answer

        def begin_and_check(messages, tools):
            expected, parent = self.prompt(messages)
            call = begin(messages, tools)
            assert call.tokens == expected, "what is read is what was sampled before"
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
        if ending < 0.03:
            self.seen["hangs"] += 1
            await asyncio.Event().wait()
        if ending < 0.08:
            self.seen["raises"] += 1
            raise_failed()
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
        stop = self.rng.choice((None, None, None, "da"))
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
        self.seen["stopped at a text"] += bool(stop) and stop in begins.said


def raise_failed():
    from asyncrl.engine.score import Failed

    raise Failed("no good")


@pytest.mark.parametrize("on_update", ["keep", "resume"])
@pytest.mark.parametrize("template", [KEEP, DROP], ids=["keeps", "drops"])
def test_every_token_that_is_sampled_for_an_agent_is_trained_once_behind_what_the_engine_read(
    template, on_update
):
    rng, seen = random.Random(0), Counter()
    tokenizer = make_tokenizer(template)
    eos = tokenizer.eos_token_id
    engine = SamplingEngine(rng, tokenizer.convert_tokens_to_ids([*LETTERS, "ab"]), eos)
    config = Config(
        task="agent:x",
        max_prompt_tokens=CONTEXT - LIMIT,
        max_response_tokens=LIMIT,
        env_timeout_s=1.0,
        on_update=on_update,
    )
    proxy = LLMProxy(config, engine, [eos])
    endpoint = Endpoint(config)

    async def run_one(ticket_id, group):
        agent = RandomAgent(rng, tokenizer, template == DROP, seen)
        agents = Agents(
            agent, endpoint, Template(tokenizer, [eos]), Replies(config, tokenizer), float, None
        )
        episode = AgentEpisode(config, make_ticket(ticket_id), 0, agents=agents, proxy=proxy)
        agent.episode = episode
        agent.oracle.listen(episode.calls)
        running = asyncio.create_task(episode.run(0))
        if rng.random() < 0.05:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            seen["aborted"] += not running.done()
            episode.abort()
        trajectory = await running
        check(trajectory, episode, agent)

    def check(trajectory, episode, agent):
        seen[trajectory.finish_reason] += 1
        kept = [call for call in episode.calls._calls if call.completion is not None]
        # one that was given up while the engine was paused has never reached it
        sampled = calls_of(engine, trajectory.ticket_id, len(kept))
        cut = []
        for call, columns in zip(kept, sampled, strict=True):
            prompt, tokens, *_ = columns
            size = len(call.completion.tokens)
            assert call.tokens == prompt or not tokens
            assert call.completion.tokens == tokens[:size]
            cut.append((prompt, *(column[:size] for column in columns[1:])))
        assert_trained_once(trajectory, cut)
        assert trajectory.num_generated <= LIMIT
        assert trajectory.num_turns == sum(bool(tokens) for _, tokens, *_ in cut)
        numbers = {
            number
            for number, call in enumerate(episode.calls._calls)
            if call.completion is not None and call.completion.tokens
        }
        continued = {agent.oracle.parents.get(number) for number in numbers} - {None}
        assert len(trajectory.segment_lengths) == len(numbers) - len(continued)

    async def update():
        for version in range(1, 10**6):
            await asyncio.sleep(0.05)
            await proxy.update(version, [{}])

    async def run_all():
        await proxy.update(0, [{}])
        updating = asyncio.create_task(update())
        waiting = iter(range(1, NUM_AGENTS // 4 + 1))

        async def run_some():
            for ticket_id in waiting:
                await run_one(ticket_id, 0)

        await asyncio.gather(*(run_some() for _ in range(NUM_TOGETHER)))
        updating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await updating

    asyncio.run(run_all())
    endpoint.close()
    sampled = proxy.take_sampled()
    assert sampled.new == engine.num_sampled
    for what in (
        "new", "go on", "shorten", "edit", "again", "left", "hangs", "raises", "stopped at a text", "length", "stop",
        "failed", "context_length_exceeded", "max_response_tokens", "aborted",
    ):  # fmt: skip
        assert seen[what], f"nothing of this kind happened: {what}"
