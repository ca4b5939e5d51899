"""An OpenAI endpoint on the loopback address, in the event loop of a rollout worker.

The API key is a secret of one trajectory. So a call finds its trajectory, and no agent can speak for another one.
"""

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Protocol

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from asyncrl.config import Config
from extras.agents.protocol import (
    ChatRequest,
    RequestError,
    TextRequest,
    parse,
    stream,
)

MAX_BODY_BYTES = 16 << 20
"""Largest body of a request."""
MAX_WAITING_CONNECTIONS = 4096
KEEP_ALIVE_S = 3600
"""Time after which the server closes an idle connection. Clients close theirs long before, so no request is lost."""


class Session(Protocol):
    """What the endpoint asks of a trajectory."""

    def start_call(self, request: ChatRequest | TextRequest) -> asyncio.Task[dict]:
        """Begin to answer a request. The task raises RequestError."""
        ...

    async def give_up(self, call: asyncio.Task) -> None:
        """End a call whose client has gone."""
        ...


class Endpoint:
    """Serves the trajectories of one worker."""

    def __init__(self, config: Config) -> None:
        """Open the port; calls are answered once `serve` runs."""
        self._config = config
        self._sessions: dict[str, Session] = {}
        self._socket = socket.create_server(
            ("127.0.0.1", 0), backlog=MAX_WAITING_CONNECTIONS, reuse_port=False
        )
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self.app = FastAPI(openapi_url=None)
        self.app.add_exception_handler(RequestError, _refuse)
        self.app.add_exception_handler(404, _refuse_path)
        self.app.add_exception_handler(405, _refuse_path)
        self.app.get("/v1/models")(self._list_models)
        self.app.post("/v1/chat/completions")(self._chat)
        self.app.post("/v1/completions")(self._complete)

    @contextlib.contextmanager
    def admit(self, ticket_id: int, session: Session) -> Iterator[str]:
        """Yield the key of a trajectory, by which its calls are known until the end of the block."""
        key = f"{ticket_id}-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]

    async def serve(self) -> None:
        """Answer calls until cancelled."""
        server = _Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        await server.serve(sockets=[self._socket])

    def close(self) -> None:
        """Close the port."""
        self._socket.close()

    async def _list_models(self, request: Request) -> dict:
        self._session_of(request)
        model = {"id": self._config.model, "object": "model", "created": 0, "owned_by": "asyncrl"}
        return {"object": "list", "data": [model]}

    async def _chat(self, request: Request):
        return await self._answer(request, ChatRequest)

    async def _complete(self, request: Request):
        return await self._answer(request, TextRequest)

    async def _answer(self, request: Request, kind: type):
        session = self._session_of(request)
        asked = parse(kind, await _read_body(request))
        asked.check_sampling(self._config)
        call = session.start_call(asked)
        left = asyncio.create_task(_wait_until_gone(request))
        try:
            await asyncio.wait({call, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            if not call.done():
                await session.give_up(call)
        response = await call
        if not asked.stream:
            # as ASCII text, as a policy may write half of a character
            return Response(json.dumps(response), media_type="application/json")
        with_usage = bool((asked.stream_options or {}).get("include_usage"))
        return StreamingResponse(stream(response, with_usage), media_type="text/event-stream")

    def _session_of(self, request: Request) -> Session:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise RequestError(
                "Incorrect API key provided. It is that of one trajectory, and ends with it.",
                401,
                code="invalid_api_key",
            )
        return session


class _Server(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                f"The request's body has more than {MAX_BODY_BYTES} bytes.",
                413,
                code="request_too_large",
            )
    return bytes(body)


async def _wait_until_gone(request: Request) -> None:
    receive: Callable = request.receive
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: RequestError) -> JSONResponse:
    return JSONResponse(error.body, error.status)


async def _refuse_path(request: Request, error: Exception) -> JSONResponse:
    refused = RequestError(f"Unknown request URL: {request.method} {request.url.path}.", 404)
    return JSONResponse(refused.body, error.status_code)
