"""Agents with the real OpenAI client, endpoint and proxy, over an engine that says what it is told."""

import asyncio
import contextlib
import functools
import json
import sys

import httpx
import openai
import psutil
import pytest
from fake_engine import SamplingEngine
from programs import wait_until
from speech import KEEP, assert_trained_once, calls_of, make_ticket, make_tokenizer, speech
from tiny_policy import save_tiny_model
from transformers import AutoTokenizer
from user_files import write_user_code

from asyncrl import user_code
from asyncrl.config import Config
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.engine.rewards import Failed
from asyncrl.trainer.families import read_config
from extras.agents.endpoint import MAX_BODY_BYTES, Endpoint
from extras.agents.episode import AgentEpisode, Agents
from extras.agents.replies import Replies
from extras.agents.runners import Coroutines, Programs
from extras.agents.template import Template
from extras.agents.worker import PLUGIN

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>{"name": "add",   "arguments": {"x": 2, "y": 3}}</tool_call>'
"""Of other spaces than a template would write."""
WITH_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}<assistant>"
)


class Room:
    """What agents run in: an endpoint that serves, and a proxy."""

    def __init__(
        self,
        say=None,
        *,
        choose=None,
        template=KEEP,
        rewards=None,
        **options,
    ):
        self.tokenizer = make_tokenizer(template)
        sizes = {"max_prompt_tokens": 400, "max_response_tokens": 300, "env_timeout_s": 60.0}
        self.config = Config(task="agent:x", **{**sizes, **options})
        eos = self.tokenizer.eos_token_id
        self.engine = SamplingEngine(choose or speech(self.tokenizer, say), eos)
        self.proxy = LLMProxy(self.config, self.engine, [eos])
        self.endpoint = Endpoint(self.config)
        assert self.endpoint._socket.getsockname()[0] == "127.0.0.1", "nobody else may call it"
        self.agents = Agents(
            None,
            self.endpoint,
            Template(self.tokenizer, [eos]),
            Replies(self.config, self.tokenizer),
            rewards,
        )

    def run(self, agent, num=1, answer="{}"):
        """The trajectories of an agent, which agree with what the engine sampled."""
        return asyncio.run(asyncio.wait_for(self._run(agent, num, answer), 100))

    def succeed(self, function):
        """The trajectory of an agent that is a function of a test, and gives a reward of 1."""
        (trajectory,) = self.run(Inline(function))
        assert trajectory.reward == 1.0, trajectory.failure
        return trajectory

    async def _run(self, agent, num, answer):
        await self.proxy.load_weights(3, [{"version": 3}])
        serving = asyncio.create_task(self.endpoint.serve())
        self.agents.agent = agent
        self.episodes = [
            AgentEpisode(
                self.config,
                make_ticket(number, answer=answer),
                0,
                agents=self.agents,
                proxy=self.proxy,
            )
            for number in range(num)
        ]
        trajectories = await asyncio.gather(*(episode.run(0) for episode in self.episodes))
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        for trajectory in trajectories:
            if not self.proxy.token_counts.discarded:
                assert_trained_once(trajectory, calls_of(self.engine, trajectory.ticket_id, 20))
        return trajectories


class Inline:
    """An agent that is a function of a test; see Coroutines for real ones."""

    def __init__(self, function):
        self.function = function

    async def run(self, endpoint, key, problem):
        async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=0) as client:
            return await self.function(client)


def user(content):
    return {"role": "user", "content": content}


def shout(prompt):
    return prompt.split(">")[-2].split("<")[0][::-1]


def test_a_plain_client_in_a_thread_and_a_stream_say_what_the_async_one_does():
    def ask(url, key):
        client = openai.OpenAI(base_url=url, api_key=key)
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages = [user("one")]
        first = client.chat.completions.create(model="any", messages=messages)
        assert first.choices[0].message.content == "eno"
        messages += [first.choices[0].message, user("two")]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(model="x", messages=messages, **options))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "owt"
        assert chunks[-1].usage.completion_tokens == 4
        assert chunks[-2].choices[0].finish_reason == "stop"
        text = client.completions.create(model="x", prompt="<user>abc<assistant>").choices[0].text
        more = client.completions.create(
            model="x", prompt=f"<user>abc<assistant>{text}<user>next<assistant>", stream=True
        )
        return text + "".join(chunk.choices[0].text for chunk in more)

    class Plain:
        async def run(self, endpoint, key, problem):
            assert await asyncio.to_thread(ask, endpoint.url, key) == "cbatxen"
            return 1.0

    room = Room(shout)
    (trajectory,) = room.run(Plain())
    assert trajectory.reward == 1.0, trajectory.failure
    assert trajectory.num_turns == 4 and len(trajectory.segment_lengths) == 3
    assert room.tokenizer.decode(trajectory.tokens).count("eno") == 1, "the next prompt has it once"


def test_an_agent_gets_the_special_tokens_that_the_policy_wrote_but_for_the_one_that_ends_it():
    async def agent(client):
        answer = await client.chat.completions.create(model="x", messages=[user("hi")])
        text = await client.completions.create(model="x", prompt="<user>hi<assistant>")
        said = {answer.choices[0].message.content, text.choices[0].text}
        return float(said == {"a<tool>b"})

    sampled = make_tokenizer().convert_tokens_to_ids(["a", "<tool>", "b", "<eos>"])
    room = Room(choose=lambda prompt, num_sampled: sampled[num_sampled])
    trajectory = room.succeed(agent)
    assert room.tokenizer.decode(trajectory.tokens).count("a<tool>b<eos>") == 2


@pytest.mark.parametrize("streams", [False, True])
def test_thoughts_and_a_tool_call_are_read_by_the_parsers_and_continue_as_they_were_written(
    streams,
):
    def say(prompt):
        return "</think>it is 5" if "<tool>" in prompt else f"<think>add?</think>so {CALL}"

    async def agent(client):
        messages = [user("2 and 3")]
        options = {"model": "x", "tools": TOOLS, "tool_choice": "required", "stream": streams}
        answer = await client.chat.completions.create(messages=messages, **options)
        if streams:
            deltas = [chunk.choices[0].delta async for chunk in answer]
            (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
            content = "".join(delta.content or "" for delta in deltas)
            thoughts = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
            rewritten = call.model_dump()  # the same object, in another order
            rewritten["function"]["arguments"] = '{"y": 3, "x": 2}'
            reply = {
                "role": "assistant",
                "content": content,
                "reasoning_content": thoughts,
                "tool_calls": [rewritten],
            }
        else:
            reply = answer.choices[0].message
            (call,) = reply.tool_calls
            content, thoughts = reply.content, reply.reasoning_content
            assert answer.choices[0].finish_reason == "tool_calls"
        assert (content.strip(), thoughts) == ("so", "add?")
        assert (
            json.loads(call.function.arguments) == {"x": 2, "y": 3} and call.function.name == "add"
        )
        messages += [reply, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        last = await client.chat.completions.create(
            messages=messages, model="x", tools=TOOLS, stream=False
        )
        return float(last.choices[0].message.content == "it is 5")

    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    room = Room(say, template=WITH_TOOLS, **parsers)
    trajectory = room.succeed(agent)
    assert len(trajectory.segment_lengths) == 1
    assert CALL in room.tokenizer.decode(trajectory.tokens)


def test_a_tool_call_that_cannot_be_read_leaves_the_reply_as_text(capsys):
    """Most of vLLM's parsers give it back themselves, and that of internlm raises."""
    text = "<|action_start|><|plugin|>{3"

    async def agent(client):
        answer = await client.chat.completions.create(model="x", messages=[user("2")], tools=TOOLS)
        message = answer.choices[0].message
        return float(message.content == text and not message.tool_calls)

    room = Room(lambda prompt: text, template=WITH_TOOLS, tool_parser="internlm")
    room.succeed(agent)
    assert room.agents.replies.num_unread == 1
    assert "1 replies are left as text" in capsys.readouterr().out


def test_tools_without_a_parser_are_warned_of_once(capsys):
    async def agent(client):
        for text in ("2", "3"):
            answer = await client.chat.completions.create(
                model="x", messages=[user(text)], tools=TOOLS
            )
        return float(not answer.choices[0].message.tool_calls)

    room = Room(lambda prompt: CALL, template=WITH_TOOLS)
    room.succeed(agent)
    warning = "warning: the agent gives tools, and without --tool-parser"
    assert capsys.readouterr().out.count(warning) == 1


@pytest.mark.parametrize(
    ("template", "parser", "is_warned"),
    [
        ("{{ messages }}", "hermes", True),
        ("{{ messages }}", "", False),
        ("{% if tools %}{{ tools }}{% endif %}{{ messages }}", "hermes", False),
    ],
)
def test_an_agent_whose_tools_the_template_does_not_show_is_warned_of_it(
    template, parser, is_warned, tmp_path, capsys
):
    path = save_tiny_model(str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    PLUGIN.check(Config(model=path, tool_parser=parser), read_config(path))
    assert ("shows the policy no tools" in capsys.readouterr().out) is is_warned


def test_a_dead_engine_ends_the_worker_and_fails_no_trajectory():
    def die(prompt):
        raise MemoryError("the engine is dead")

    async def agent(client):
        await client.chat.completions.create(model="x", messages=[user("hi")])

    with pytest.raises(MemoryError, match="the engine is dead"):
        Room(die).run(Inline(agent))


LONG = "y" * 500
TOO_LONG = (
    "This model's maximum context length is 400 tokens. However, your messages resulted in 502 tokens. Please reduce "
    "the length of the messages."
)
BAD = [
    ({"temperature": 0.5}, "Unsupported value: 'temperature' does not support 0.5", "unsupported_value"),
    ({"n": 2}, "Invalid value for 'n'", None),
    ({"logit_bias": {"1": 2}}, "Unrecognized request argument supplied: logit_bias", None),
    ({"messages": []}, "Invalid value for 'messages'", None),
    ({"tools": [{"type": "function", "name": "add"}]}, "Invalid value for 'tools.0.function'", None),
    ({"messages": [{"role": "pope", "content": "x"}]}, "Invalid value for 'messages.0.role'", None),
    ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "Invalid value for", None),
    ({"messages": [user(LONG)]}, TOO_LONG, "context_length_exceeded"),
]  # fmt: skip
NO_TOKENS = [[50256], [-1], [1 << 33]]


WITH_DEFAULTS = {
    "/completions": {
        "prompt": ["<user>hi<assistant>"],
        "logprobs": None,
        "echo": False,
        "best_of": 1,
        "suffix": None,
    },
    "/chat/completions": {
        "messages": [
            user("hi"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": None, "type": "function", "function": {"name": "add"}}],
            },
        ],
        "logit_bias": None,
        "top_logprobs": None,
        "reasoning_effort": None,
    },
}
"""Requests that spell out defaults."""


def test_an_agent_that_raises_after_a_stop_text_has_failed_and_is_not_cut():
    """The engine does not know the text, and samples to the limit of the trajectory."""

    async def agent(client):
        request = {"model": "x", "messages": [user("hi")], "stop": "\n"}
        answer = await client.chat.completions.create(**request)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == "ab"
        raise Failed("my tool server is down")

    (trajectory,) = Room(lambda prompt: "ab\n" + "c" * 400).run(Inline(agent))
    assert (trajectory.finish_reason, trajectory.failure) == ("failed", "my tool server is down")


def test_an_abort_ends_a_trajectory_whose_reward_is_awaited():
    class Slow:
        async def score(self, answer, text):
            room.episodes[0].abort()
            await asyncio.sleep(60)

    room = Room(shout, rewards=Slow())

    async def agent(client):
        await client.chat.completions.create(model="x", messages=[user("hi")])
        return "said"

    (trajectory,) = room.run(Inline(agent))
    assert trajectory.finish_reason == "aborted"


def test_a_second_abort_does_not_interrupt_the_end_of_an_agent():
    has_ended = []

    async def agent(client):
        room.episodes[0].abort()
        try:
            await asyncio.sleep(60)
        finally:
            room.episodes[0].abort()
            await asyncio.sleep(0)
            has_ended.append(True)

    room = Room(shout)
    (trajectory,) = room.run(Inline(agent))
    assert trajectory.finish_reason == "aborted" and has_ended == [True]


def test_a_partial_of_a_coroutine_fails_its_own_trajectory_alone():
    async def run(client, problem, word):
        raise KeyError(word)

    agent = Coroutines("agent:x", functools.partial(run, word="no"))
    (trajectory,) = Room(shout).run(agent)
    assert trajectory.failure.startswith("agent:x, line ")
    assert trajectory.failure.endswith(": KeyError: 'no'")


def test_bad_requests_are_refused_in_openais_form_and_good_ones_still_work():
    async def agent(client):
        for changes, message, code in BAD:
            body = {"model": "x", "messages": [user("hi")], **changes}
            answer = await httpx_post(client, "/chat/completions", json=body)
            assert answer.status_code == 400, (changes, answer.text)
            error = answer.json()["error"]
            assert error["message"].startswith(message), error
            assert (error["type"], error["code"]) == ("invalid_request_error", code)
        for prompt in NO_TOKENS:
            body = {"model": "x", "prompt": prompt}
            answer = await httpx_post(client, "/completions", json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"].startswith("Invalid value for 'prompt': token")
        for key in ("Bearer wrong", "Bearer 0-", f"Basic {client.api_key}", client.api_key):
            headers = {"Authorization": key}
            for path in ("/chat/completions", "/completions"):
                answer = await httpx_post(client, path, headers=headers, json={})
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await httpx_post(client, "/embeddings", json={})).status_code == 404
        assert (await httpx_post(client, "/chat/completions", content=b"{")).status_code == 400
        large = await httpx_post(client, "/completions", content=b"x" * (MAX_BODY_BYTES + 1))
        assert large.status_code == 413
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="x", messages=[user(LONG)])
        assert caught.value.code == "context_length_exceeded"
        for path, body in WITH_DEFAULTS.items():
            answer = await httpx_post(client, path, json={"model": "x", "max_tokens": 1, **body})
            assert answer.status_code == 200, answer.text
        assert (await client.models.retrieve("any")).object == "model"
        options = {"temperature": 1, "seed": 5, "user": "me", "max_completion_tokens": 2}
        answer = await client.chat.completions.create(
            model="x", messages=[user("hi there")], **options
        )
        return float(answer.choices[0].message.content == "er")

    Room(shout).succeed(agent)


async def httpx_post(client, path, headers=None, **content):
    base = str(client.base_url).rstrip("/")
    default = {"Authorization": f"Bearer {client.api_key}"}
    async with httpx.AsyncClient() as plain:
        return await plain.post(base + path, headers={**default, **(headers or {})}, **content)


# Coroutines of files


def load_agent(path):
    task = f"agent:{path}:run"
    return Coroutines(task, user_code.load(task))


FILE = '''
import asyncio, time


def problems(seed):
    return [{"n": n} for n in range(20)]


async def run(client, problem):
    async def ask(words):
        messages = [{"role": "user", "content": words}]
        answer = await client.chat.completions.create(model="x", messages=messages)
        return answer.choices[0].message.content

    said = await ask("abcd")
    BODY
    return float(said == "dcba") + problem["n"]
'''  # fmt: skip
REPEATS = """while True:
        try:
            await ask("y" * 500)
        except Exception:
            await asyncio.sleep(0.05)"""
HANGS = {"env_timeout_s": 0.3}


@pytest.mark.parametrize(
    ("body", "options", "reason", "outcome"),
    [
        ("await client.close()", {}, "stop", 5.0),
        ("raise KeyError('no')", {}, "failed", ":run, line 16: KeyError: 'no'"),
        ("raise SystemExit(3)", {}, "failed", ":run, line 16: SystemExit: 3"),
        ("return 'much'", {}, "failed", "the reward is 'much', not a finite number or a dict of them"),
        ("raise asyncio.CancelledError", HANGS, "failed", "or a task that it awaited, was cancelled"),
        ("context = client._client._transport._pool._ssl_context; assert context.check_hostname", {}, "stop", 5.0),
        ("await asyncio.sleep(60)", HANGS, "failed", "no call and no end for 0.3 s"),
        ("time.sleep(1)", HANGS, "failed", "no call and no end for 0.3 s"),
        (REPEATS, {"env_timeout_s": 1.0}, "length", 0.0),
        ("await ask('b')", {"max_response_tokens": 5}, "length", 0.0),
        ("pass", {"max_response_tokens": 5}, "stop", 5.0),
        ("pass", {"max_response_tokens": 4}, "length", 5.0),
    ],
)  # fmt: skip
def test_the_coroutine_of_a_file_gets_a_client_of_its_own_and_its_end_is_the_trajectorys(
    tmp_path, monkeypatch, body, options, reason, outcome
):
    """The client asks no proxy. An agent that repeats a call that is refused gets no new time."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    path = write_user_code(tmp_path, FILE.replace("BODY", body))
    room = Room(shout, **options)
    trajectories = room.run(load_agent(path), 30 if "close" in body else 1, answer='{"n": 4}')
    assert not room.endpoint._sessions, "a key ends with its trajectory"
    for trajectory in trajectories:
        assert trajectory.finish_reason == reason, trajectory.failure
        assert reason == "failed" or trajectory.reward == outcome
        assert reason != "failed" or trajectory.failure.endswith(outcome)
        assert options or trajectory.num_generated == 5


def test_an_agent_that_blocks_its_loop_leaves_it_and_the_next_one_works(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.agents.runners.BLOCKED_S", 0.1)
    source = "import time\n\n\nasync def run(client, problem):\n    time.sleep(problem['s'])\n    return 1.0\n"
    agent = load_agent(write_user_code(tmp_path, source))
    endpoint = Endpoint(Config())

    async def run():
        blocking = asyncio.create_task(agent.run(endpoint, "key", {"s": 30}))
        await asyncio.sleep(0.5)
        blocking.cancel()
        while agent._loop is not None:
            await asyncio.sleep(0.01)
        return await agent.run(endpoint, "key", {"s": 0})

    assert asyncio.run(asyncio.wait_for(run(), 20)) == 1.0
    endpoint.close()


# Programs

PROGRAM = """
import json, sys
from openai import OpenAI
word = json.loads(sys.stdin.readline())["word"]
answer = OpenAI().chat.completions.create(model="x", messages=[{"role": "user", "content": word}])
print("not this line")
print(json.dumps({"a": answer.choices[0].message.content == word[::-1], "b": 2}))
"""


PLAIN_PROGRAM = """
import json, os, sys, urllib.request
word = json.loads(sys.stdin.readline())["word"]
body = json.dumps({"model": "x", "messages": [{"role": "user", "content": word}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
print("not this line")
print(answer["choices"][0]["message"]["content"])
"""
FAILURES = [
    ("raise SystemExit(7)", " ended with status 7; the log of its worker has what it said"),
    ("print('x' * 2**21)", " printed more than 1048576 bytes"),
    ("print('[' * 10**5)", "expected the reward as a number or a JSON object of numbers"),
    ("print('fine')", "the last line of its output is 'fine', expected the reward"),
    (None, "no_such"),
]
REWARD = """
def right(response, word):
    return {"right": 2.0 * (response.splitlines()[-1] == word[::-1]), "lines": len(response.splitlines())}
"""


def run_program(command, **options):
    room = Room(shout, **options)
    return room.run(Programs(command), answer='{"word": "drawer"}')[0]


def test_a_program_reads_its_problem_and_its_last_line_or_what_the_run_makes_of_it_is_the_reward(
    tmp_path,
):
    reward = write_user_code(tmp_path, REWARD)
    rewards = RewardPool("agent:x", [f"{reward}:right"], 60, 1)
    for source, options, parts in (
        (PROGRAM, {}, {"a": 1.0, "b": 2.0}),
        (PLAIN_PROGRAM, {"rewards": rewards}, {"right": 2.0, "lines": 2.0}),
    ):
        (tmp_path / "program.py").write_text(source)
        trajectory = run_program(f"{sys.executable} {tmp_path / 'program.py'}", **options)
        assert trajectory.num_generated == 7, trajectory.failure
        assert (trajectory.reward, trajectory.reward_parts) == (sum(parts.values()), parts)
    rewards.close()


@pytest.mark.parametrize(("source", "failure"), FAILURES)
def test_a_program_that_fails_says_why(source, failure):
    trajectory = run_program("no_such" if source is None else f'{sys.executable} -c "{source}"')
    assert trajectory.finish_reason == "failed" and failure in trajectory.failure


def test_a_program_that_hangs_is_gone_with_all_that_it_started(tmp_path):
    note = "echo $! >> pids;"
    (tmp_path / "program").write_text(
        f"echo $$ > pids; sleep 100 & {note} setsid sleep 101 & {note} sleep 102"
    )
    trajectory = run_program(f"sh -c 'cd {tmp_path} && . ./program'", env_timeout_s=1.5)
    assert trajectory.failure == "no call and no end for 1.5 s"
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    wait_until(lambda: not any(map(is_running, pids)))


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
