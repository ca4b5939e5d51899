"""The message that an agent gets for sampled text: with vLLM's own parsers of tool calls and thoughts."""

from asyncrl.config import Config
from asyncrl.engine.rewards import one_line
from extras.agents.protocol import ChatRequest

MISFITS = (KeyError, RuntimeError, ValueError)
"""Errors of vLLM's parsers if the tokenizer lacks their tokens, or if they read something else than text."""
UNREADABLE = (KeyError, RecursionError, TypeError, ValueError)
"""Errors of vLLM's parsers `internlm` and `dots` for text of a wrong form. Other parsers give it back as text."""
TRIAL_TOOL = {"type": "function", "function": {"name": "trial"}}


class Replies:
    """Reads messages from sampled text."""

    def __init__(self, config: Config, tokenizer) -> None:
        """Raises ValueError for a parser that does not fit the model."""
        self._tokenizer = tokenizer
        if config.tool_parser or config.reasoning_parser:
            from vllm.tokenizers.hf import get_cached_tokenizer

            # Each reply has a parser, and the parser asks for the whole vocabulary.
            self._tokenizer = get_cached_tokenizer(tokenizer)
        self._tool_parser = self._reasoning_parser = None
        self.num_unread = 0
        """Replies that a parser could not read, so that the agent got their text."""
        self._has_warned = False
        if config.tool_parser:
            from vllm.tool_parsers import ToolParserManager

            self._tool_parser = ToolParserManager.get_tool_parser(config.tool_parser)
            self._check_fit("--tool-parser", config.tool_parser, config.model)
        if config.reasoning_parser:
            from vllm.reasoning import ReasoningParserManager

            load = ReasoningParserManager.get_reasoning_parser
            self._reasoning_parser = load(config.reasoning_parser)
            self._check_fit("--reasoning-parser", config.reasoning_parser, config.model)

    def _check_fit(self, option: str, name: str, model: str) -> None:
        """Read an empty text, so that a parser that cannot read it is refused before sampling begins."""
        try:
            self._parse("", _asked([TRIAL_TOOL]))
        except MISFITS as error:
            raise ValueError(
                f"{option} {name} cannot read what --model {model} writes: {one_line(error)}; give the parser that the "
                f"model's page names for vLLM, or leave {option} out"
            ) from None

    def read(self, said: str, request: ChatRequest) -> dict:
        """Return the assistant's message for sampled text. The text has its special tokens without the stop token.

        Parts that a parser cannot read stay text, because a policy may write anything.
        """
        message = {"role": "assistant", "content": said}
        tools = request.given_tools
        if tools and self._tool_parser is None and not self._has_warned:
            self._has_warned = True
            print(
                "warning: the agent gives tools, and without --tool-parser it gets each call as text; docs/agents.md "
                "says which parser fits a model",
                flush=True,
            )
        if self._reasoning_parser is None and (self._tool_parser is None or not tools):
            return message
        asked = _asked(tools)
        try:
            return self._parse(said, asked)
        except UNREADABLE as error:
            self.num_unread += 1
            if self.num_unread.bit_count() == 1:  # the first, the second, the fourth …
                print(f"{self.num_unread} replies are left as text: {one_line(error)}", flush=True)
            return message

    def _parse(self, said: str, asked) -> dict:
        message = {"role": "assistant", "content": said}
        if self._reasoning_parser is not None:
            parser = self._reasoning_parser(self._tokenizer)
            thoughts, message["content"] = parser.extract_reasoning(said, asked)
            if thoughts:
                message["reasoning_content"] = thoughts
        if self._tool_parser is not None and asked.tools:
            parser = self._tool_parser(self._tokenizer, asked.tools)
            reading = parser.extract_tool_calls(message["content"] or "", asked)
            message["content"] = reading.content
            if reading.tool_calls:
                message["tool_calls"] = [call.model_dump() for call in reading.tool_calls]
        return message


def _asked(tools: list[dict]):
    """Return a request with these tools, as vLLM's parsers want it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    choice = "auto" if tools else "none"
    return ChatCompletionRequest(messages=[], tools=tools or None, tool_choice=choice)
