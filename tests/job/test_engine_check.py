"""What a run does about engines that do not have the trainer's weights; test_probe.py has real engines."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asyncrl.config import Config
from asyncrl.job.probe import EngineCheck, Probe

TOKENS = [[1, 2, 3]]
JOINED = 7
"""A worker that joined the run, and is shut out."""


class Leader:
    """What the check asks of a node: scores of versions 0 to 9, and what engines scored."""

    def __init__(self):
        scores = [(version, TOKENS, [-1.0, -2.0]) for version in range(10)]
        self.config, self.device = Config(dtype="float32"), torch.device("cpu")
        self.probe = Probe(self.config, {"tokens": TOKENS, "scores": scores})
        self.placement = SimpleNamespace(transport="shm")
        self.controller, self.run = self, self
        self.scored, self.events, self.shut_out = {}, [], []

    def take_probes(self):
        scored, self.scored = self.scored, {}
        return scored

    def shuts_out(self, worker, problem):
        if worker == JOINED:
            self.shut_out.append(problem)
        return worker == JOINED

    def record(self, event, **fields):
        self.events.append((event, fields))

    def texts(self):
        return [fields["text"] for event, fields in self.events if event == "warning"]


@pytest.fixture
def check():
    """Scores that engines report, by version and worker, are `gap` nats from the trainer's."""
    node = Leader()
    engine_check = EngineCheck(node)

    def run(step, **gaps):
        for name, gap in gaps.items():
            worker, version = map(int, name[1:].split("_"))
            logprobs = np.array([-1.0, -2.0], np.float32) + np.float32(gap)
            node.scored.setdefault(version, {})[worker] = (logprobs,)
        engine_check.check(step)
        return node

    return run


@pytest.mark.parametrize("first", [0, 4])
def test_first_weights_that_are_wrong_end_the_run_in_one_line(check, first):
    check(first + 1, **{f"w0_{first}": 1e-5})
    with pytest.raises(RuntimeError, match=rf"^worker 1 .+ at version {first} .+ shm") as ended:
        check(first + 1, **{f"w1_{first}": 0.01})
    assert "\n" not in str(ended.value)


def test_later_weights_that_are_wrong_are_warned_of_once_and_a_joined_host_is_shut_out(
    check, capsys
):
    node = check(1, w0_0=0.0, w7_0=0.5)
    assert len(node.shut_out) == 1 and not node.texts()
    for step in (2, 3):
        check(step, **{f"w0_{step}": 0.01})
    (text,) = node.texts()
    assert text.startswith("step 2: worker 0 does not have the trainer's weights: at version 2")
    assert capsys.readouterr().out == f"warning: {text}\n"
    mismatches = [
        fields["mismatch/abs_mean"] for event, fields in node.events if event == "mismatch"
    ]
    assert mismatches == pytest.approx([0.0, 0.5, 0.01, 0.01], abs=1e-6)
