"""Requests of agents in OpenAI's form, and their answers: replies, streams and errors."""

import itertools
import json
import time
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from asyncrl.config import Config

_NUMBERS = itertools.count()
"""Numbers of answers. A random id would be read from the kernel. Python then runs another thread for milliseconds."""


class RequestError(Exception):
    """A request that is refused, as OpenAI refuses it."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": "invalid_request_error" if status < 500 else "server_error",
                "param": param,
                "code": code,
            }
        }


class _WithoutNulls(BaseModel):
    """A field that is null counts as left out."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Function(BaseModel):
    name: str
    arguments: str = "{}"


class _ToolCall(_WithoutNulls):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _ToolFunction(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict | None = None
    strict: bool | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: _ToolFunction


class Message(BaseModel):
    """A message of a conversation. Fields that a template cannot show, such as a refusal, are passed over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def as_dict(self) -> dict:
        """Return the message as templates read it: with its text in one piece, and arguments of tools as an object."""
        fields = self.model_dump(exclude_none=True)
        fields["role"] = "system" if self.role == "developer" else self.role
        if isinstance(self.content, list):
            fields["content"] = "".join(part.text for part in self.content)
        fields.setdefault("content", "")
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = _parsed(call["function"]["arguments"])
        return fields


def _parsed(arguments: str) -> Any:
    """Return the JSON in the arguments of a tool call, or the text if it is not JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


class _Sampling(_WithoutNulls):
    """Fields that chat and plain completions share. `model` may be any. Other fields are ignored if the run decides."""

    model_config = ConfigDict(extra="forbid")
    model: str = ""
    n: Literal[1] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    stream: bool | None = None
    stream_options: dict | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        """Texts that end a response."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    def check_sampling(self, config: Config) -> None:
        """Refuse to sample otherwise than the run does: the trainer would read other probabilities."""
        for name in ("temperature", "top_p"):
            asked, allowed = getattr(self, name), getattr(config, name)
            if asked is not None and asked != allowed:
                raise RequestError(
                    f"Unsupported value: '{name}' does not support {asked:g}. The run samples with {allowed:g}; leave "
                    f"it out, or start the run with --{name.replace('_', '-')} {asked:g}.",
                    param=name,
                    code="unsupported_value",
                )


class ChatRequest(_Sampling):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict | None = None
    parallel_tool_calls: bool | None = None
    logprobs: Literal[False] | None = None
    response_format: dict[str, Literal["text"]] | None = None
    metadata: dict | None = None
    store: bool | None = None

    @property
    def given_tools(self) -> list[dict]:
        """Tools that the policy may call."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]


class TextRequest(_Sampling):
    """A request to /v1/completions. `prompt` is a text, or its tokens; a list of one is taken, too."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _take_the_only_one(cls, prompt: Any) -> Any:
        is_list_of_one = isinstance(prompt, list) and len(prompt) == 1
        return prompt[0] if is_list_of_one and isinstance(prompt[0], str | list) else prompt


def parse(kind: type[_Sampling], body: bytes) -> Any:
    """Return the request in a body. Raises RequestError."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        mistake = error.errors()[0]
    param = ".".join(str(part) for part in mistake["loc"]) or None
    if mistake["type"] == "extra_forbidden":
        raise RequestError(f"Unrecognized request argument supplied: {param}", param=param)
    raise RequestError(f"Invalid value for '{param}': {mistake['msg']}.", param=param)


def context_overflow(num_tokens: int, max_tokens: int) -> RequestError:
    """Return the error of a prompt that leaves no room for a response."""
    return RequestError(
        f"This model's maximum context length is {max_tokens} tokens. However, your messages resulted in {num_tokens} "
        "tokens. Please reduce the length of the messages.",
        param="messages",
        code="context_length_exceeded",
    )


def make_response(model: str, content: dict, finish_reason: str, usage: tuple[int, int]) -> dict:
    """Return the answer to a request. `content` is a `message`, or the `text` of a plain completion.

    `usage` is the number of tokens that were read and sampled.
    """
    is_chat = "message" in content
    num_read, num_sampled = usage
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{next(_NUMBERS)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_read,
            "completion_tokens": num_sampled,
            "total_tokens": num_read + num_sampled,
        },
    }


def as_stream(response: dict, with_usage: bool) -> str:
    """Return an answer as server-sent events. It comes in one piece, because it is sampled to its end first."""
    (choice,) = response["choices"]
    if "message" in choice:
        response = response | {"object": "chat.completion.chunk"}
        delta = choice.pop("message")
        for index, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = index
        choice["delta"] = delta
    events = [response | {"usage": None}]
    if with_usage:
        events.append(response | {"choices": []})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
