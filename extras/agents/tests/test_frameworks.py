"""Agents of other people's frameworks, unchanged, with a calculator. They run where the framework is installed.

pip install --target FOLDER pydantic-ai-slim smolagents verifiers==0.3.1
PYTHONPATH=FOLDER pytest extras/agents/tests/test_frameworks.py
"""

import asyncio
import json
import re

import pytest
from test_agents import WITH_TOOLS, Inline, Room

from extras.agents import verifiers_task
from extras.agents.runners import Coroutines

SIZES = {"max_prompt_tokens": 20_000, "max_response_tokens": 2_000}


def calculate(prompt):
    """Call the tool, and repeat what it gives."""
    results = re.findall(r"<tool>(?:Observation:\s*)?([\d.]+)", prompt)
    if not results:
        return '<tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 3}}</tool_call>'
    return f"The result is {results[-1]}."


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: One number.
        b: The other number.
    """
    return a * b


def test_pydantic_ai_calls_a_tool():
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run(client):
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        agent = ai.Agent(model, system_prompt="Use the calculator.", tools=[multiply])
        result = await agent.run("What is 17 times 3?")
        return float("51" in result.output)

    room = Room(calculate, template=WITH_TOOLS, tool_parser="hermes", **SIZES)
    (trajectory,) = room.run(Inline(run))
    assert trajectory.reward == 1.0, trajectory.failure
    assert trajectory.num_turns == 2 and len(trajectory.segment_lengths) == 1


def call_tools(prompt):
    """Call the tool, and then the one that gives the answer, in the form that smolagents asks for."""
    if "51" not in prompt.rpartition("17 times 3")[2]:
        return '<tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 3}}</tool_call>'
    return '<tool_call>{"name": "final_answer", "arguments": {"answer": "51"}}</tool_call>'


def write_code(prompt):
    """Write code, which smolagents runs. It asks for an end at a stop text."""
    return "Thought: easy.\n<code>\nfinal_answer(multiply(17, 3))\n</code>"


@pytest.mark.parametrize(
    ("agent_class", "say", "options", "num_turns"),
    [
        ("ToolCallingAgent", call_tools, {"template": WITH_TOOLS, "tool_parser": "hermes"}, 2),
        ("CodeAgent", write_code, {}, 1),
    ],
)
def test_smolagents_calls_a_tool_or_runs_code(agent_class, say, options, num_turns):
    smolagents = pytest.importorskip("smolagents")

    async def run(client):
        model = smolagents.OpenAIModel(
            "policy", api_base=str(client.base_url), api_key=client.api_key
        )
        tools = [smolagents.tool(multiply)]
        agent = getattr(smolagents, agent_class)(tools=tools, model=model, verbosity_level=0)
        return float(str(await asyncio.to_thread(agent.run, "What is 17 times 3?")) == "51")

    (trajectory,) = Room(say, **options, **SIZES).run(Inline(run))
    assert trajectory.reward == 1.0, trajectory.failure
    assert trajectory.num_turns == num_turns


ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset

def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b

def right(completion, answer) -> float:
    return float(answer in completion[-1].content)

def load_environment(count: int = 1):
    question = {"role": "user", "content": "What is 17 times 3?"}
    rows = Dataset.from_list([{"prompt": [question], "answer": "51"}] * count)
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(dataset=rows, tools=[multiply], rubric=rubric, max_turns=4)
'''


def test_an_environment_of_verifiers_with_a_tool_gives_its_rows_and_rewards(tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    (tmp_path / "times_three.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    task = "verifiers:times-three"
    environment = verifiers_task.load_environment(task, ["count=3"])
    rows = verifiers_task.splits_of(environment)["train"]
    assert len(rows) == 3
    room = Room(calculate, template=WITH_TOOLS, tool_parser="hermes", **SIZES)
    agent = Coroutines(task, verifiers_task.make_agent(task, []))
    (trajectory,) = room.run(agent, answer=json.dumps(rows[0]))
    assert trajectory.reward == 1.0, trajectory.failure
    assert trajectory.num_turns == 2 and len(trajectory.segment_lengths) == 1
