"""An engine that samples under the real proxy what a test tells it, and keeps what it sampled."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass
class Request:
    """What the engine was asked for, and its rows: token, log-prob and version of each that it sampled."""

    name: str
    """That of the caller."""
    prompt: list[int]
    seed: int | None
    version: int
    rows: list[tuple[int, float, int]] = field(default_factory=list)


def random_tokens(rng, tokens, eos):
    """A choice of the next token: one of some, or the end in a fifth of all cases."""
    return lambda prompt, num_sampled: eos if rng.random() < 0.2 else rng.choice(tokens)


class SamplingEngine:
    """The calls of vLLM that the proxy makes. At each turn of the event loop it samples a token of every request.

    It insists on the order of an update, and takes a request only while it is neither paused nor of another version.
    """

    errored = False

    def __init__(self, choose, eos):
        """`choose(prompt, num_sampled)` returns the next token; `eos` ends a response."""
        self.choose, self.eos = choose, eos
        self.engine_core = self
        self.version, self.loaded, self.state = -1, -1, "resume"
        self.running, self.aborted = set(), set()
        self.requests = []
        self.num_sampled = 0

    async def generate(self, prompt, params, engine_id):
        assert self.state == "resume" and prompt["cache_salt"] == str(self.version)
        tokens = prompt["prompt_token_ids"]
        request = Request(engine_id.split("-")[0], tokens, params.seed, self.version)
        self.requests.append(request)
        # as with vLLM, the engine does not know it at once
        await asyncio.sleep(0)
        self.running.add(engine_id)
        while (reason := self.step(request, params.max_tokens, engine_id)) is None:
            await asyncio.sleep(0)
        self.running.discard(engine_id)
        tokens, logprobs, versions = zip(*request.rows, strict=True) if request.rows else ((),) * 3
        spans = [
            SimpleNamespace(version=str(version), start=place, end=place + 1)
            for place, version in enumerate(versions)
        ]
        output = SimpleNamespace(
            index=0,
            token_ids=tokens,
            finish_reason=reason,
            logprobs=SimpleNamespace(logprobs=logprobs),
            weight_versions=spans,
            routed_experts=None,
        )
        yield SimpleNamespace(finished=True, outputs=[output])

    def step(self, request, max_tokens, engine_id):
        """Sample a token unless the engine is paused. Returns why the request has ended, None if it has not."""
        if engine_id in self.aborted:
            return "abort"
        if len(request.rows) == max_tokens:
            return "length"
        if self.state != "resume":
            return None
        self.num_sampled += 1
        token = self.choose(request.prompt, len(request.rows))
        # a log-prob of its own, which float32 has exactly
        request.rows.append((token, -self.num_sampled / 2**20, self.version))
        return "stop" if token == self.eos else None

    def requests_of(self, name):
        """What was asked for under a caller's name, in order."""
        return [request for request in self.requests if request.name == name]

    async def abort(self, engine_ids):
        self.aborted.update(set(engine_ids) & self.running)

    def enter(self, state, *allowed):
        assert self.state in allowed, f"{state} after {self.state}"
        self.state = state

    async def pause_scheduler_async(self, mode, clear_cache):
        while mode == "wait" and self.running:
            await asyncio.sleep(0)
        self.enter("pause", "resume")

    async def is_sleeping(self):
        return self.state == "sleep"

    async def sleep(self, level, mode):
        assert not self.running and level == 2
        self.enter("sleep", "pause")

    async def wake_up(self):
        self.enter("pause", "sleep")

    async def start_weight_update(self):
        self.enter("start", "pause")

    async def update_weights(self, request):
        self.enter("load", "start", "receive", "load")
        self.loaded = request.update_info["version"]

    async def finish_weight_update(self):
        self.enter("finish", "load")

    async def update_weight_version(self, version):
        assert version == str(self.loaded)
        self.version = self.loaded
        self.enter("stamp", "finish")

    async def resume_generation(self):
        self.enter("resume", "stamp", "pause")

    def shutdown(self, timeout):
        self.is_shut_down = True
