"""A conversation whose answers nobody reads, as an environment and as an agent."""

from data.environments import TextEnvironment

ASK = "Tell me in a few sentences what a harbour, a lighthouse and a lock are for."
MORE = "Go on, and name another thing by the water."
MAX_TURNS = 8


class Chat(TextEnvironment):
    """Asks for more."""

    max_turns = MAX_TURNS
    seed_shows = False

    def _start(self):
        return ASK

    def _act(self, response):
        return MORE, float(len(response) % 2), False


def problems(seed):
    return [{"number": number} for number in range(100)]


async def run(client, problem):
    messages = [{"role": "user", "content": ASK}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        answer = completion.choices[0].message
        messages += [answer, {"role": "user", "content": MORE}]
    return float(len(answer.content) % 2)
