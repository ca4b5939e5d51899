"""A conversation of several turns as tokens, in which what the policy wrote is never tokenised again.

The tokens of a trajectory are `first(observation)`, the policy's own tokens, `reply(observation, ended)`, the policy's
own tokens, and so on. A reply is what the chat template puts between one assistant message and the next; it is read off
a conversation of stand-ins, as it must not depend on what was said before. (Some templates do shorten earlier turns,
Qwen3's for one drops their thoughts; here they stay in the context as they were sampled.)
"""

import functools
from collections.abc import Sequence

from jinja2 import TemplateError

_USER, _ASSISTANT, _OTHER = "1", "2", "3"  # stand-ins for what is said: a token each in every vocabulary
_CACHED = 1024  # conversations of stand-ins and one observation
_ADVICE = "take a model with another template, such as Qwen/Qwen3-0.6B"


class Conversation:
    """The chat template of a tokenizer, as the two pieces of which conversations are built."""

    end_of_turn: int
    """Id of the token that ends an assistant message; not always the tokenizer's eos, so generation must stop at it
    too. Where the policy stopped at another one, or was cut, `reply` begins with it."""

    def __init__(self, tokenizer) -> None:
        """Raises ValueError if the tokenizer has no chat template, or one that gives no fixed reply."""
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {name} has no chat template, and turns cannot be told apart without one; take a "
                "model with one, such as Qwen/Qwen3-0.6B"
            )
        self._tokenizer = tokenizer
        # Members of a group often see the same, and a tokenizer takes as long as everything else in a short turn.
        self._encode = functools.lru_cache(_CACHED)(self._encode)
        try:
            self._find_reply()
            is_fixed = self._is_fixed()
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {name} refuses a conversation of user, assistant and user ({error}); {_ADVICE}"
            ) from error
        if not is_fixed:
            raise ValueError(
                f"the chat template of {name} has no fixed text between two turns of the assistant: once it writes "
                f"{tokenizer.decode(self.reply(_USER, ended=False))!r} there, and it must begin with a special token "
                f"and be the same in every conversation; {_ADVICE}"
            )
        self.end_of_turn = self.reply(_USER, ended=False)[self._closing - 1]

    def first(self, observation: str) -> list[int]:
        """Tokens before the policy's first turn: the observation as user message, and the generation prompt."""
        return list(self._encode(observation))

    def reply(self, observation: str, ended: bool) -> list[int]:
        """Tokens between two turns of the policy: close its message, say the observation, open its next message.

        `ended` says that the policy's own tokens end with `end_of_turn`, which is then not repeated.
        """
        tail = self._encode(_USER, _ASSISTANT, observation)[self._head :]
        return list(tail[self._closing :] if ended else tail)

    def _encode(self, *contents: str) -> tuple[int, ...]:
        """Tokens of messages, the user's and the assistant's in turn, with the generation prompt."""
        roles = ("user", "assistant") * len(contents)
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        return tuple(
            self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def _find_reply(self) -> None:
        """Where a reply begins: at what no longer depends on the assistant's message."""
        tokens = self._encode(_USER, _ASSISTANT, _USER)
        tail = _common_tail(tokens, self._encode(_USER, _OTHER, _USER))
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self._head = len(tokens) - len(tail)
        self._closing = next((i for i, token in enumerate(tail, start=1) if token in special), 0)

    def _is_fixed(self) -> bool:
        """Whether replies are closed by a special token and depend on nothing but the observation."""
        reply, other_reply = self.reply(_USER, ended=False), self.reply(_OTHER, ended=False)
        longer = self._encode(_OTHER, _OTHER, _USER, _ASSISTANT, _USER)
        has_closing = self._closing > 0 and reply[: self._closing] == other_reply[: self._closing]
        # With a head of 0, the assistant's message made no difference: the template leaves it out.
        return self._head > 0 and has_closing and _common_tail(longer, reply) == tuple(reply)


def _common_tail(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]
