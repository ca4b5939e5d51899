"""What an engine says to agents, a tokenizer of characters, and what reads what was sampled."""

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


def speech(tokenizer, say):
    """A choice of the next token: what `say` gives for the text of the prompt, in single letters, and the end."""

    def choose(prompt, num_sampled):
        letters = tokenizer.convert_tokens_to_ids(list(say(tokenizer.decode(prompt))))
        return [*letters, tokenizer.eos_token_id][num_sampled]

    return choose


def calls_of(engine, ticket_id, num_calls):
    """What was sampled for the calls of a ticket: the prompt of each, and its rows."""
    calls = []
    for number in range(num_calls):
        prompt, rows = [], []
        for request in engine.requests_of(f"{ticket_id}.{number}"):
            prompt = prompt or request.prompt
            tokens = [token for token, *_ in rows]
            assert request.prompt == prompt + tokens, "continued otherwise than begun"
            rows += request.rows
        calls.append((prompt, rows))
    return calls


def assert_trained_once(trajectory, calls):
    """Each token of each call is trained in one place, behind the tokens that the engine read before it.

    `calls` are prompt and rows. Nothing else is trained, and no segment is longer than a call.
    """
    trained = []
    wholes = [[*prompt, *(token for token, *_ in rows)] for prompt, rows in calls if rows]
    for place in trajectory.segments if trajectory.segment_lengths else ():
        mask = trajectory.loss_mask[place]
        columns = trajectory.tokens, trajectory.behavior_logprobs, trajectory.policy_versions
        tokens, logprobs, versions = (column[place] for column in columns)
        assert tokens.tolist() in wholes
        assert (versions[~mask] == -1).all() and (logprobs[~mask] == 0).all()
        rows_here = list(zip(*map(np.ndarray.tolist, (tokens, logprobs, versions)), strict=True))
        for number, (prompt, rows) in enumerate(calls):
            turn = slice(len(prompt), len(prompt) + len(rows))
            is_here = tokens[: len(prompt)].tolist() == prompt and rows_here[turn] == rows
            if rows and is_here and mask[turn].all():
                trained.append(number)
    assert sorted(trained) == [number for number, call in enumerate(calls) if call[1]]
    assert trajectory.num_generated == sum(len(rows) for _, rows in calls)


def make_replies(**options):
    """Replies that are read with these options."""
    return Replies(Config(**options), make_tokenizer())
