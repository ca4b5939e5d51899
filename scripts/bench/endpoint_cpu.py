"""CPU time of an agent's call, of client and endpoint apart: `python scripts/bench/endpoint_cpu.py MODEL`.

200 agents of 5 turns in one process, by OpenAI's client and the real template, tokenizer and endpoint. The engine's
place takes a function that answers at once, with 3 random tokens. Agents have a thread of their own, as in a worker.
"""

import asyncio
import random
import sys
import time

from transformers import AutoTokenizer

from asyncrl.config import Config
from asyncrl.records import Completion, Ticket
from extras.agents.endpoint import Endpoint
from extras.agents.episode import AgentEpisode, Agents
from extras.agents.replies import Replies
from extras.agents.runners import Coroutines
from extras.agents.template import Template

NUM_AGENTS, TURNS, TOKENS = 200, 5, 3
ASK = (
    "I think of a number from 1 to 31. Find it in 5 guesses; I say if it is higher or lower than your guess. "
    "Answer with a number."
)


class AtOnce:
    """A proxy that samples random tokens."""

    def __init__(self, tokenizer):
        self.tokenizer, self.rng = tokenizer, random.Random(0)

    async def abort(self, request_ids):
        pass

    async def generate(self, request_id, tokens, seed, max_tokens, prefix):
        await asyncio.sleep(0)
        sampled = [self.rng.randrange(5, len(self.tokenizer)) for _ in range(TOKENS - 1)]
        sampled.append(self.tokenizer.eos_token_id)
        return Completion(sampled, [-1.0] * TOKENS, [0] * TOKENS, "stop")


async def agent(client, problem):
    messages = [{"role": "user", "content": ASK}]
    for _ in range(TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        messages += [completion.choices[0].message, {"role": "user", "content": "higher"}]
    return 1.0


async def main(path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    eos, config = tokenizer.eos_token_id, Config(task="agent:x", max_prompt_tokens=600)
    agents = Agents(
        Coroutines("agent", agent), Endpoint(config), Template(tokenizer, [eos]), Replies(config, tokenizer),
        lambda reward: reward, None,
    )  # fmt: skip
    proxy = AtOnce(tokenizer)

    async def play(number):
        ticket = Ticket(number, number, 0, 1, 0, (), "{}", 0, seed=number, min_version=0)
        trajectory = await AgentEpisode(config, ticket, 0, agents=agents, proxy=proxy).run(0)
        assert trajectory.num_turns == TURNS, trajectory.failure

    await play(NUM_AGENTS)  # imports and caches
    process, endpoint = time.process_time(), time.thread_time()
    await asyncio.gather(*map(play, range(NUM_AGENTS)))
    calls = NUM_AGENTS * TURNS / 1000
    endpoint_ms = (time.thread_time() - endpoint) / calls
    both_ms = (time.process_time() - process) / calls
    print(f"ms of CPU a call: client {both_ms - endpoint_ms:.2f}, endpoint {endpoint_ms:.2f}")


asyncio.run(main(sys.argv[1]))
