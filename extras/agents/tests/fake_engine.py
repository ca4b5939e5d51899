"""An engine that samples random letters under the real proxy, and keeps what it sampled; and what reads them."""

import asyncio
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.config import Config
from asyncrl.records import Ticket
from extras.agents.replies import Replies

LETTERS = "abcd"
SPECIAL = ("<eos>", "<system>", "<user>", "<assistant>", "<tool>")
KEEP = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "<assistant>"
)
DROP = KEEP.replace(
    "{{ m.content }}", "{{ m.content.split('c')[-1] if m.role == 'assistant' else m.content }}"
)
"""What an assistant wrote before its last `c` is a thought, and later prompts do not have it."""


def make_tokenizer(template=KEEP):
    """Characters, and `ab` as a token: what was sampled as a and b would be one token if it was tokenised again."""
    characters = [*(chr(code) for code in range(32, 127)), "\n"]
    words = {word: number for number, word in enumerate([*SPECIAL, *characters, "ab"])}
    tokenizer = Tokenizer(models.BPE(words, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\t", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = template
    return fast


def make_ticket(ticket_id, group_id=0, answer="{}"):
    return Ticket(ticket_id, group_id, 0, 1, 0, (), answer, 0, seed=ticket_id, min_version=0)


class SamplingEngine:
    """The calls of vLLM that the proxy makes. Each of its steps samples a token of every request."""

    def __init__(self, rng, tokens, eos):
        self.rng, self.tokens, self.eos = rng, tokens, eos
        self.engine_core = self
        self.version = None
        self.paused = False
        self.aborted = set()
        self.running = set()
        self.num_sampled = 0
        self.sampled = {}
        """By the caller's id: the prompt, tokens, log-probs and versions."""

    async def generate(self, prompt, params, engine_id):
        name = engine_id.split("-")[0]
        first, *columns = self.sampled.setdefault(name, (prompt["prompt_token_ids"], [], [], []))
        assert prompt["prompt_token_ids"] == first + columns[0], "continued otherwise than begun"
        start, reason = len(columns[0]), None
        self.running.add(engine_id)
        while reason is None:
            await asyncio.sleep(0)
            if engine_id in self.aborted:
                reason = "abort"
            elif not self.paused:
                self.num_sampled += 1
                token = self.next_token(first, columns[0])
                row = (token, -1e-3 * (self.num_sampled % 4096), int(self.version))
                for column, value in zip(columns, row, strict=True):
                    column.append(value)
                if token == self.eos:
                    reason = "stop"
                elif len(columns[0]) - start == params.max_tokens:
                    reason = "length"
        self.running.discard(engine_id)
        tokens, logprobs, versions = (column[start:] for column in columns)
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
        )
        yield SimpleNamespace(finished=True, outputs=[output])

    def next_token(self, prompt, tokens):
        return self.eos if self.rng.random() < 0.2 else self.rng.choice(self.tokens)

    async def abort(self, engine_ids):
        self.aborted.update(set(engine_ids) & self.running)

    async def pause_scheduler_async(self, mode, clear_cache):
        self.paused = True

    async def start_weight_update(self):
        assert self.paused

    async def update_weights(self, request):
        pass

    async def finish_weight_update(self):
        pass

    async def update_weight_version(self, version):
        self.version = version

    async def resume_generation(self):
        self.paused = False

    def shutdown(self, timeout):
        pass


class SpeakingEngine(SamplingEngine):
    """Says what a function gives for the text of its prompt, in single letters, and ends."""

    def __init__(self, tokenizer, say):
        super().__init__(None, None, tokenizer.eos_token_id)
        self.tokenizer, self.say = tokenizer, say

    def next_token(self, prompt, tokens):
        text = self.say(self.tokenizer.decode(prompt))
        letters = self.tokenizer.convert_tokens_to_ids(list(text))
        return [*letters, self.eos][len(tokens)]


def calls_of(engine, ticket_id, num_calls):
    """What was sampled for the calls of a ticket: prompt, tokens, log-probs and versions."""
    names = (f"{ticket_id}.{number}" for number in range(num_calls))
    return [engine.sampled.get(name, ([], [], [], [])) for name in names]


def assert_trained_once(trajectory, calls):
    """Each token of each call is trained in one place, behind the tokens that the engine read before it.

    `calls` are prompt, tokens, log-probs and versions. Nothing else is trained, and no segment is longer than a call.
    """
    trained_rows = []
    wholes = [(*prompt, *tokens) for prompt, tokens, *_ in calls if tokens]
    for place in trajectory.segments if trajectory.segment_lengths else ():
        tokens, mask = trajectory.tokens[place], trajectory.loss_mask[place]
        logprobs, versions = (
            trajectory.behavior_logprobs[place],
            trajectory.policy_versions[place],
        )
        assert tuple(tokens.tolist()) in wholes
        assert (versions[~mask] == -1).all() and (logprobs[~mask] == 0).all()
        for number, (prompt, sampled, expected_logprobs, expected_versions) in enumerate(calls):
            start, end = len(prompt), len(prompt) + len(sampled)
            is_here = (
                sampled
                and tokens[:end].tolist() == [*prompt, *sampled]
                and mask[start:end].all()
                and np.array_equal(logprobs[start:end], np.float32(expected_logprobs))
                and versions[start:end].tolist() == expected_versions
            )
            if is_here:
                trained_rows.append(number)
    assert sorted(trained_rows) == [number for number, call in enumerate(calls) if call[1]]
    assert trajectory.num_generated == sum(len(call[1]) for call in calls)


def make_replies(**options):
    """Replies that are read with these options."""
    return Replies(Config(**options), make_tokenizer())
