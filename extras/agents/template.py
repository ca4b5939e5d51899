"""Messages as text and tokens, by the tokenizer and the chat template of the model."""

import functools
from collections.abc import Iterable, Sequence

from data.problem import encode_text
from extras.agents.protocol import RequestError


class Template:
    """The chat template of a tokenizer, and the tokens that end a response."""

    def __init__(self, tokenizer, stop_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_tokens = functools.cache(self._num_tokens)

    def render(self, messages: list[dict], tools: list[dict]) -> str:
        """Return the text that the policy continues. Raises jinja2.TemplateError for messages that have no place."""
        return self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )

    def encode(self, text: str, after: str = "") -> list[int]:
        """Return the tokens of a text that is behind another one, whose tokens are known.

        Some tokenizers treat the beginning of a text specially. So both texts are encoded together.
        """
        whole = self._tokenizer.encode(after + text, add_special_tokens=False)
        return whole[self._num_tokens(after) :]

    def _num_tokens(self, end: str) -> int:
        """Return the number of tokens of a text that ends responses; there are few, so each is encoded once."""
        return len(self._tokenizer.encode(end, add_special_tokens=False))

    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text without a template, with the tokens that the tokenizer puts before each text."""
        return encode_text(text, self._tokenizer)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise RequestError for token ids that the tokenizer does not have: they would end the engine."""
        size = len(self._tokenizer)
        if not all(0 <= token < size for token in tokens):
            raise RequestError(
                f"Invalid value for 'prompt': token ids must be in 0 … {size - 1}.", param="prompt"
            )

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def split_end(self, tokens: Sequence[int]) -> tuple[Sequence[int], str]:
        """Return the tokens of a response without its stop token, and the text of that token or an empty text."""
        if tokens and tokens[-1] in self._stop_token_ids:
            return tokens[:-1], self.decode(tokens[-1:])
        return tokens, ""
