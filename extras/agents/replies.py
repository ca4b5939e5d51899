"""The message that an agent gets for sampled text: with vLLM's own parsers of tool calls and thoughts."""

from asyncrl.config import Config
from extras.agents.protocol import ChatRequest


class Replies:
    """Reads messages from sampled text."""

    def __init__(self, config: Config, tokenizer) -> None:
        """Raises ValueError for a parser that vLLM does not know."""
        self._tokenizer = tokenizer
        self._tool_parser = self._reasoning_parser = None
        if config.tool_parser:
            from vllm.tool_parsers import ToolParserManager

            known = ToolParserManager.list_registered()
            self._tool_parser = _find(
                "--tool-parser", config.tool_parser, known, ToolParserManager.get_tool_parser
            )
        if config.reasoning_parser:
            from vllm.reasoning import ReasoningParserManager

            known = ReasoningParserManager.list_registered()
            self._reasoning_parser = _find(
                "--reasoning-parser",
                config.reasoning_parser,
                known,
                ReasoningParserManager.get_reasoning_parser,
            )

    def read(self, said: str, visible: str, request: ChatRequest) -> dict:
        """Return the assistant's message. `said` has special tokens, which parsers look for, and `visible` has none.

        What a parser cannot read is text: a policy may write anything.
        """
        message = {"role": "assistant", "content": visible}
        tools = request.given_tools
        if self._reasoning_parser is None and (self._tool_parser is None or not tools):
            return message
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        choice = "auto" if tools else "none"
        try:
            asked = ChatCompletionRequest(messages=[], tools=tools or None, tool_choice=choice)
            return self._parse(said, asked)
        except Exception:  # foreign code may raise anything
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


def _find(option: str, name: str, known: list[str], load):
    if name not in known:
        raise ValueError(f"{option} {name} is none of vLLM's: {', '.join(sorted(known))}")
    return load(name)
