"""A conversation of several turns as tokens. The policy's own tokens are never tokenised again.

A trajectory's tokens are `first(observation)`, the policy's own tokens, `reply(observation, ended)`, the policy's own
tokens, and so on. A reply is what the chat template puts between one assistant message and the next. It must not depend
on earlier messages, so it is read from a conversation of stand-ins. (Some templates shorten earlier turns: Qwen3's
drops their thoughts. Here they stay in the context as they were sampled.)
"""

import functools

from jinja2 import TemplateError

# Stand-ins for messages: a token each in every vocabulary.
USER = "1"
ASSISTANT = "2"
OTHER = "3"
MAX_CACHED = 1024
"""Observations whose tokens are remembered."""
ADVICE = "take a model with another template, such as Qwen/Qwen3-0.6B"


class Conversation:
    """The chat template of a tokenizer, as the two pieces that make up a conversation."""

    end_of_turn: int
    """Id of the token that ends an assistant message. If the policy stopped at another token, or was cut, `reply`
    begins with this one."""

    def __init__(self, tokenizer) -> None:
        """Raises ValueError if the tokenizer has no chat template, or one that gives no fixed reply."""
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {name} has no chat template, which separates the turns; take a model that has one, "
                "such as Qwen/Qwen3-0.6B"
            )
        self._tokenizer = tokenizer
        # Members of a group often get equal observations, and encoding takes as long as the rest of a short turn.
        self._encode = functools.lru_cache(MAX_CACHED)(self._encode)
        try:
            self._find_reply()
            is_fixed = self._is_fixed()
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {name} refuses a conversation of user, assistant and user ({error}); {ADVICE}"
            ) from error
        if not is_fixed:
            raise ValueError(
                f"the chat template of {name} has no fixed text between two turns of the assistant: once it writes "
                f"{tokenizer.decode(self.reply(USER, ended=False))!r} there, and it must begin with a special token "
                f"and be the same in every conversation; {ADVICE}"
            )
        self.end_of_turn = self.reply(USER, ended=False)[self._closing - 1]

    def first(self, observation: str) -> list[int]:
        """Tokens before the policy's first turn: the observation as user message, and the generation prompt."""
        return list(self._encode(observation))

    def reply(self, observation: str, ended: bool) -> list[int]:
        """Tokens between two turns of the policy: the end of its message, the observation, the start of its next one.

        `ended` says that the policy's own tokens end with `end_of_turn`. It is then not repeated.
        """
        tail = self._encode(USER, ASSISTANT, observation)[self._head :]
        return list(tail[self._closing :] if ended else tail)

    def _encode(self, *contents: str) -> tuple[int, ...]:
        """Tokens of messages, the user's and the assistant's in turn, with the generation prompt."""
        roles = ("user", "assistant") * len(contents)
        messages = [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=False)
        ]
        return tuple(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def _find_reply(self) -> None:
        """Find where a reply begins: where tokens no longer depend on the assistant's message."""
        tokens = self._encode(USER, ASSISTANT, USER)
        tail = _common_tail(tokens, self._encode(USER, OTHER, USER))
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self._head = len(tokens) - len(tail)
        self._closing = next((i for i, token in enumerate(tail, start=1) if token in special), 0)

    def _is_fixed(self) -> bool:
        """Return whether a special token closes replies and they depend only on the observation."""
        reply = tuple(self.reply(USER, ended=False))
        other_reply = tuple(self.reply(OTHER, ended=False))
        longer = self._encode(OTHER, OTHER, USER, ASSISTANT, USER)
        has_closing = self._closing > 0 and reply[: self._closing] == other_reply[: self._closing]
        # A head of 0 means that the assistant's message makes no difference: the template leaves it out.
        return self._head > 0 and has_closing and _common_tail(longer, reply) == reply


def _common_tail(tokens: tuple[int, ...], other_tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The longest end that both have."""
    length = 0
    for token, other_token in zip(reversed(tokens), reversed(other_tokens), strict=False):
        if token != other_token:
            break
        length += 1
    return tokens[len(tokens) - length :]
