"""An environment of the package verifiers with a tool. It runs where the package is installed.

pip install --target FOLDER verifiers==0.3.1
PYTHONPATH=FOLDER pytest extras/agents/tests/test_verifiers_task.py
"""

import json
import re

import pytest
from test_agents import WITH_TOOLS, Room

from extras.agents import verifiers_task
from extras.agents.runners import Coroutines


def calculate(prompt):
    """Call the tool, and repeat what it gives."""
    results = re.findall(r"<tool>(?:Observation:\s*)?([\d.]+)", prompt)
    if not results:
        return '<tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 3}}</tool_call>'
    return f"The result is {results[-1]}."


def call_and_fall_silent(prompt):
    """Call the tool, and then end a reply before it has begun: verifiers takes that for an error."""
    return "" if "<tool>" in prompt else calculate(prompt)


ENVIRONMENT = '''
from __future__ import annotations

import verifiers as vf
from datasets import Dataset

def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b

def right(completion, answer) -> float:
    return float(answer in completion[-1].content)

def called(completion) -> float:
    return 0.5 * any(getattr(message, "tool_calls", None) for message in completion)

def load_environment(counts: list[int] = [1], is_benchmark: bool = False) -> RETURNED:
    question = {"role": "user", "content": "What is 17 times 3?"}
    rows = Dataset.from_list([{"prompt": [question], "answer": "51"}] * sum(counts))
    rubric = vf.Rubric(funcs=[right, called])
    rows = {"eval_dataset" if is_benchmark else "dataset": rows}
    return vf.ToolEnv(**rows, tools=[multiply], rubric=rubric, max_turns=4, stop_errors=[TypeError])
'''


# packages often import what they annotate with for the type checker only
@pytest.mark.parametrize(
    "name, returned", [("times-three", "vf.Environment"), ("times-3", "OnlyForTheTypeChecker")]
)
def test_an_environment_of_verifiers_with_a_tool_gives_its_rows_and_rewards(
    name, returned, tmp_path, monkeypatch
):
    pytest.importorskip("verifiers")
    module = tmp_path / f"{name.replace('-', '_')}.py"
    module.write_text(ENVIRONMENT.replace("RETURNED", returned))
    monkeypatch.syspath_prepend(tmp_path)
    task = f"verifiers:{name}"
    for arguments, split in (
        (["counts=[1, 2]"], "train"),
        (["counts=[3]", "is_benchmark=true"], ""),
    ):
        environment = verifiers_task.load_environment(task, arguments)
        splits = verifiers_task.splits_of(environment, name)
        assert {part: len(rows) for part, rows in splits.items()} == {split: 3}
    with pytest.raises(ValueError, match=r"--task-args counts=\[1: counts is no JSON: "):
        verifiers_task.load_environment(task, ["counts=[1"])
    _, row = splits[""][0]
    sizes = {"max_prompt_tokens": 20_000, "max_response_tokens": 2_000}
    agent = Coroutines(task, verifiers_task.make_agent(task, []))
    for say, reward in ((calculate, 1.5), (call_and_fall_silent, 0.5)):
        room = Room(say, template=WITH_TOOLS, tool_parser="hermes", **sizes)
        (trajectory,) = room.run(agent, answer=json.dumps(row))
        assert trajectory.reward == reward, trajectory.failure
        assert trajectory.num_turns == 2 and len(trajectory.segment_lengths) == 1
    call = '<tool_call>{"name": "multiply", "arguments": {"c": 1}}</tool_call>'
    room = Room(lambda prompt: call, template=WITH_TOOLS, tool_parser="hermes", **sizes)
    (trajectory,) = room.run(agent, answer=json.dumps(row))
    assert trajectory.finish_reason == "failed"
    assert re.match(f"{task}: ToolCallError.*TypeError", trajectory.failure), trajectory.failure
