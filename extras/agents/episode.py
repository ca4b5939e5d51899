"""One trajectory of an agent: its calls are sampled as they come, and its end gives the reward."""

import asyncio
import bisect
import itertools
import json
import time
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.config import Config
from asyncrl.engine.episode import Episode
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.engine.rewards import Failed, Reward, RewardFunction, add_rewards, one_line
from asyncrl.records import (
    Completion,
    FinishReason,
    Ticket,
    Trajectory,
    slice_columns,
)
from extras.agents.endpoint import Endpoint
from extras.agents.protocol import (
    ChatRequest,
    Message,
    RequestError,
    TextRequest,
    context_overflow,
    make_response,
)
from extras.agents.replies import Replies
from extras.agents.runners import Agent, Programs, last_line_as_reward, text_of
from extras.agents.segments import Call, Calls
from extras.agents.template import Template


@dataclass
class Agents:
    """The parts that all trajectories of a worker share."""

    agent: Agent
    endpoint: Endpoint
    template: Template
    replies: Replies
    rewards: RewardPool | None
    """Scores the text that an agent returns, with --reward."""

    def close(self) -> None:
        """Close the port, and end the processes that score."""
        self.endpoint.close()
        if self.rewards is not None:
            self.rewards.close()


class AgentEpisode(Episode):
    """Runs one agent, and answers its calls.

    `max_response_tokens` limits all that is sampled for the trajectory. When they are used up, what is sampled beyond
    is dropped and further calls are refused. The trajectory then ends as `length`, with the reward that the agent
    gives, or 0 if it raises.
    """

    def __init__(
        self, config: Config, ticket: Ticket, member: int, *, agents: Agents, proxy: LLMProxy
    ) -> None:
        super().__init__(
            config, ticket, member, environment=agents.agent, generate=self._generate_noted
        )
        self._agents = agents
        self._proxy = proxy
        self.calls = Calls(agents.template)
        self._agent: asyncio.Task | None = None
        self._open: dict[asyncio.Task, str] = {}
        """Calls that are being answered, and the names of their requests."""
        self._clock: asyncio.TimerHandle | None = None
        self._left_s = config.env_timeout_s
        """Time that the agent had left when its newest call came, seconds."""
        self._engine_error: Exception | None = None
        """The error that the engine raised. It ends the worker, and the ticket is issued again."""
        self._spans: list[tuple[float, float]] = []
        """When the sampling of each call began and ended, Unix times in seconds."""
        self._is_scored = False
        """True if the agent has ended, and its reward is awaited."""
        self._is_late = False
        """True if the agent was ended because it took too long."""
        self._is_used_up = False
        """True if a call was cut or refused because all tokens are used up."""
        self._is_out_of_context = False
        """True if the newest call was refused because its messages are too long."""

    # The agent

    def abort(self) -> None:
        """End the trajectory where it stands."""
        if self.is_aborted:
            return  # a second cancellation would interrupt the end of the agent
        self.is_aborted = True
        if self._is_scored:
            self._task.cancel()
        elif self._agent is not None:
            self._agent.cancel()

    async def play(self) -> FinishReason:
        """Run the agent to its end, and give it its reward."""
        with self._agents.endpoint.admit(self.ticket.ticket_id, self) as key:
            problem = json.loads(self.ticket.answer)
            running = self._agents.agent.run(self._agents.endpoint, key, problem)
            self._agent = asyncio.create_task(running)
            self._start_clock(self.config.env_timeout_s)
            try:
                await asyncio.wait({self._agent})
            finally:
                self._stop_clock()
                self._agent.cancel()
        await self._end_calls()
        if self._engine_error is not None:
            raise self._engine_error
        if self.is_aborted:
            return "aborted"
        self._is_scored = True
        try:
            self.reward, parts = await self._score(self._returned())
        except Failed:
            if not (self.placed_completions and (self._is_used_up or self._is_out_of_context)):
                raise
            return "length"
        if not self.calls.segments():
            raise Failed("the agent ended without a token of the policy")
        self.reward_parts.update(parts)
        return "length" if self._is_used_up else "stop"

    def _returned(self) -> Any:
        if self._is_late:
            raise Failed(f"no call and no end for {self.config.env_timeout_s:g} s")
        if self._agent.cancelled():
            raise Failed("its coroutine, or a task that it awaited, was cancelled")
        return self._agent.result()

    async def _score(self, returned: Any) -> Reward:
        """Return reward and parts. Raises Failed."""
        if self._agents.rewards is not None:
            return await self._agents.rewards.score(self.ticket.answer, text_of(returned))
        if isinstance(self._agents.agent, Programs):
            returned = last_line_as_reward(returned)
        function = RewardFunction(lambda *_: returned, is_async=False)
        return add_rewards([await function.score("", "")])

    def _start_clock(self, limit_s: float) -> None:
        """Give the agent so much time until the next call, seconds."""
        loop = asyncio.get_running_loop()
        self._clock = loop.call_later(limit_s, self._end_late)

    def _end_late(self) -> None:
        self._is_late = True
        self._agent.cancel()

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._left_s = self._clock.when() - asyncio.get_running_loop().time()
            self._clock.cancel()
            self._clock = None

    # Its calls

    def start_call(self, request: ChatRequest | TextRequest) -> asyncio.Task[dict]:
        """Begin to answer a request. The task raises RequestError."""
        self._stop_clock()
        task = asyncio.create_task(self._answer(request))
        self._open[task] = ""
        task.add_done_callback(self._finish_call)
        return task

    def _finish_call(self, task: asyncio.Task) -> None:
        del self._open[task]
        # a call that is refused gives no new time, or an agent that repeats it would never end
        is_refused = task.cancelled() or task.exception() is not None
        if not self._open and not self._agent.done():
            self._start_clock(self._left_s if is_refused else self.config.env_timeout_s)

    async def give_up(self, call: asyncio.Task) -> None:
        """End a call whose client has gone. Sampled tokens stay in the trajectory."""
        await self._proxy.abort([self._open.get(call)])

    async def _generate_noted(self, request_id: str, *arguments) -> Completion:
        self._open[asyncio.current_task()] = request_id
        try:
            return await self._proxy.generate(request_id, *arguments)
        except Exception as error:  # vLLM may raise anything, and the episode ends by it
            self._engine_error = error
            self._agent.cancel()
            raise

    async def _end_calls(self) -> None:
        """End what is still being sampled when the agent is over."""
        await self._proxy.abort(set(self.request_ids))
        if self._open:
            await asyncio.wait(set(self._open))

    async def _answer(self, request: ChatRequest | TextRequest) -> dict:
        call = self._begin(request)
        max_tokens, is_last = self._room(call, request)
        if self._agent.done():
            raise _ended()
        started_at = time.time()
        completion = await self.ask_policy(tuple(call.tokens), max_tokens)
        self._spans.append((started_at, time.time()))
        completion = self._kept(completion, request.stops)
        self._is_used_up |= is_last and completion.finish_reason == "length"
        # noted before anything reads the text, so that no sampled token can be lost
        self.calls.end(call, completion)
        if completion.tokens:
            self.placed_completions.append((len(call.tokens), completion))
        if completion.finish_reason == "interrupted" or not completion.tokens:
            raise _ended()
        return self._reply(call, completion, request)

    def _begin(self, request: ChatRequest | TextRequest) -> Call:
        """Return the call with its prompt. Raises RequestError for what has no tokens."""
        try:
            if isinstance(request, TextRequest):
                return self.calls.begin_text(request.prompt)
            messages = [message.as_dict() for message in request.messages]
            return self.calls.begin_chat(messages, request.given_tools)
        except RequestError:
            raise
        # templates are foreign code, and tokenizers has no special errors
        except Exception as error:
            raise RequestError(f"The messages cannot be encoded: {one_line(error)}") from None

    def _room(self, call: Call, request: ChatRequest | TextRequest) -> tuple[int, bool]:
        """Return the most tokens that a call may sample, and whether the trajectory is what limits them.

        Raises RequestError if there is no room.
        """
        size = len(call.tokens)
        if not size:
            raise RequestError("The prompt has no token.", param="prompt")
        is_first = not self.placed_completions
        longest = self.config.max_prompt_tokens if is_first else self.config.max_sequence_tokens - 1
        self._is_out_of_context = size > longest
        if self._is_out_of_context:
            raise context_overflow(size, longest + (not is_first))
        left = self._tokens_left()
        if left <= 0:
            self._is_used_up = True
            raise RequestError(
                f"The trajectory has sampled its --max-response-tokens {self.config.max_response_tokens}.",
                code="max_response_tokens",
            )
        asked = [request.max_tokens, getattr(request, "max_completion_tokens", None)]
        room = self.config.max_sequence_tokens - size
        max_tokens = min(left, room, *(number for number in asked if number))
        return max_tokens, max_tokens == left

    def _tokens_left(self) -> int:
        sampled = sum(len(completion.tokens) for _, completion in self.placed_completions)
        return self.config.max_response_tokens - sampled

    def _kept(self, completion: Completion, stops: list[str]) -> Completion:
        """Return the beginning of a response that stays.

        It ends at the first stop text that the agent asked for, and at the limit of the trajectory. Calls that are
        sampled at the same time can exceed this limit together. Sampling with such an end would have given the same
        beginning. The rest counts as discarded.
        """
        tokens, reason = completion.tokens, completion.finish_reason
        whole = self._agents.template.decode(tokens) if stops else ""
        ends = [self._first_size(tokens, stop) for stop in stops if stop in whole]
        size = min(ends, default=len(tokens))
        if ends:
            reason = "stop"
        left = max(0, self._tokens_left())
        if left < size:
            size, reason = left, "length"
            self._is_used_up = True
        if not self.ticket.is_evaluation:
            self._proxy.token_counts.discarded += len(tokens) - size
        columns = slice_columns(completion, slice(size))
        return Completion(tokens[:size], reason, **columns)

    def _first_size(self, tokens: list[int], stop: str) -> int:
        """Return the fewest of the first tokens that have a text in them."""
        decode = self._agents.template.decode
        sizes = range(len(tokens) + 1)
        return bisect.bisect_left(sizes, True, key=lambda size: stop in decode(tokens[:size]))

    def _reply(
        self, call: Call, completion: Completion, request: ChatRequest | TextRequest
    ) -> dict:
        """Note what was sampled for a call, and return the answer to it, without the text that it stops at."""
        ends = [call.said.find(stop) for stop in request.stops if stop in call.said]
        text = call.said[: min(ends, default=None)]
        usage = len(call.tokens), len(completion.tokens)
        model = request.model or self.config.model
        reason = completion.finish_reason
        if isinstance(request, TextRequest):
            self.calls.answer(call, {"role": "assistant", "content": text})
            return make_response(model, {"text": text}, reason, usage)
        message = self._agents.replies.read(text, request)
        if message.get("tool_calls"):
            reason = "tool_calls"
        self.calls.answer(call, Message.model_validate(message).as_dict())
        return make_response(model, {"message": message}, reason, usage)

    # Its end

    def make_trajectory(self, *ending) -> Trajectory:
        segments = self.calls.segments()
        starts = [0, *itertools.accumulate(len(segment.tokens) for segment in segments)]
        self.tokens = [token for segment in segments for token in segment.tokens]
        self.placed_completions = [
            (start + place, completion)
            for start, segment in zip(starts, segments, strict=False)
            for place, completion in segment.turns
        ]
        now = time.time()
        self.turn_times = [
            (began, ended, min((other for other, _ in self._spans if other >= ended), default=now))
            for began, ended in sorted(self._spans)
        ]
        lengths = tuple(len(segment.tokens) for segment in segments)
        return replace(super().make_trajectory(*ending), segment_lengths=lengths)


def _ended() -> RequestError:
    return RequestError("The trajectory has ended, or its tokens are used up.", 503)
