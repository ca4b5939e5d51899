"""The calls of one agent, and the segments of tokens that they add up to.

Sampled tokens are never tokenised again. The messages of a call can extend an earlier call and the reply to it. Then
its prompt begins with the exact tokens of that call. Two things are compared: the messages, and then the text that the
chat template makes of them. Everything else begins a new branch: another conversation, a shortened history, a
sub-agent, or a template that drops earlier thoughts.

A chain of calls that extend each other is one segment. If several calls extend the same call, the first one continues
its segment, and each other one begins a branch. In a branch the tokens of earlier calls are context and off the loss
mask. So a sampled token is trained once.
"""

import json
from dataclasses import dataclass, field

from asyncrl.records import Completion
from extras.agents.template import Template


@dataclass(eq=False)
class Call:
    """One request of an agent, and what was sampled for it."""

    messages: list[dict]
    """Messages for the template. An earlier reply is in them as the text that was sampled."""
    text: str
    """The text of the prompt's tokens."""
    tokens: list[int]
    """The prompt."""
    key: tuple[str, ...] = ()
    """The agent's tools and messages, in a form that is equal if they are equal; empty for a plain text."""
    parent: "Call | None" = None
    """The call whose tokens the prompt begins with."""
    completion: Completion | None = None
    said: str = ""
    """The text that was sampled, without the token that ended it."""
    end: str = ""
    """The text of the token that ended it; empty without such a token."""


@dataclass
class Segment:
    """A sequence of tokens, and which of them were sampled."""

    tokens: list[int]
    turns: list[tuple[int, Completion]] = field(default_factory=list)
    """Place of the first token of each turn of the policy, and what was sampled there."""


class Calls:
    """The calls of one trajectory. Several may be sampled at the same time."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._calls: list[Call] = []
        self._answered: dict[tuple[str, ...], list[Call]] = {}
        """Calls by their key and the reply to them."""
        self._texts: list[Call] = []
        """Answered calls for the continuation of a plain text."""

    def begin_chat(self, messages: list[dict], tools: list[dict]) -> Call:
        """Return a call for the next message of a conversation. Raises jinja2.TemplateError; see Template.render."""
        key = (json.dumps(tools, sort_keys=True), *map(message_key, messages))
        for size in range(len(messages), 0, -1):
            for earlier in reversed(self._answered.get(key[: size + 1], ())):
                reply = {"role": "assistant", "content": earlier.said}
                extended = [*earlier.messages, reply, *messages[size:]]
                try:
                    text = self._template.render(extended, tools)
                # a template is foreign code; it may want the reply's parts, such as tool calls
                except Exception:
                    continue
                if text.startswith(earlier.text + earlier.said):
                    tokens = self._continued(earlier, text)
                    return self._add(Call(extended, text, tokens, key, earlier))
        text = self._template.render(messages, tools)
        return self._add(Call(messages, text, self._template.encode(text), key))

    def begin_text(self, prompt: str | list[int]) -> Call:
        """Return a call for the continuation of a plain text, or of tokens."""
        if isinstance(prompt, list):
            self._template.check_tokens(prompt)
            return self._add(Call([], self._template.decode(prompt), prompt))
        for earlier in sorted(self._texts, key=lambda call: -len(call.text + call.said)):
            # a token that ended the response is part of a plain text only if the agent wrote it
            if prompt.startswith(earlier.text + earlier.said + earlier.end):
                tokens = self._continued(earlier, prompt)
                return self._add(Call([], prompt, tokens, parent=earlier))
        return self._add(Call([], prompt, self._template.encode_plain(prompt)))

    def _continued(self, earlier: Call, text: str) -> list[int]:
        """Return a prompt: the exact tokens of an earlier call, and the tokens of the remaining text."""
        rest = text[len(earlier.text + earlier.said) :]
        tokens = [*earlier.tokens, *earlier.completion.tokens]
        if earlier.end and rest.startswith(earlier.end):
            tokens += self._template.encode(rest[len(earlier.end) :], after=earlier.end)
        else:  # it was cut, or it ended by another token than the template writes
            tokens += self._template.encode(rest)
        return tokens

    def _add(self, call: Call) -> Call:
        self._calls.append(call)
        return call

    def end(self, call: Call, completion: Completion) -> None:
        """Note what was sampled for a call."""
        call.completion = completion
        sampled, call.end = self._template.split_end(completion.tokens)
        call.said = self._template.decode(sampled)

    def answer(self, call: Call, reply: dict) -> None:
        """Note the message that the agent gets for a call that has ended."""
        if call.key:
            self._answered.setdefault((*call.key, message_key(reply)), []).append(call)
        else:
            self._texts.append(call)

    def segments(self) -> list[Segment]:
        """Return the segments of all calls that have a sampled token, in the order of their beginnings."""
        chains: dict[Call, list[Call]] = {}
        for call in self._calls:
            if call.completion is None or not call.completion.tokens:
                continue
            chain = chains.get(call.parent)
            if chain is None or chain[-1] is not call.parent:
                chain = []
            chain.append(call)
            chains[call] = chain
        distinct = {id(chain): chain for chain in chains.values()}
        return [_segment(chain) for chain in distinct.values()]


def _segment(chain: list[Call]) -> Segment:
    """Return the tokens of a chain of calls. Only tokens that these calls sampled are a turn."""
    last = chain[-1]
    turns = [(len(call.tokens), call.completion) for call in chain]
    return Segment([*last.tokens, *last.completion.tokens], turns)


def message_key(message: dict) -> str:
    """Return a text that is equal for messages that say the same, however a client writes them down.

    The ids of tool calls are left out: clients may give their own.
    """
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    rest = {
        name: value
        for name, value in message.items()
        if value and name not in ("role", "content", "tool_calls")
    }
    parts = [message["role"], message.get("content") or "", calls, rest]
    return json.dumps(parts, sort_keys=True)
