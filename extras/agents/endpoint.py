"""An OpenAI endpoint on the loopback address, in the event loop of a rollout worker.

The API key is a secret of one trajectory. So a call finds its trajectory, and no agent can speak for another one.
"""

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx2
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from asyncrl.config import Config
from extras.agents.protocol import ChatRequest, RequestError, TextRequest, as_stream, parse

if TYPE_CHECKING:
    from extras.agents.episode import AgentEpisode

MAX_BODY_BYTES = 16 << 20
"""Largest body of a request."""
MAX_WAITING_CONNECTIONS = 4096
KEEP_ALIVE_S = 3600
"""Time after which the server closes an idle connection. Clients close theirs long before, so no request is lost."""


class Endpoint:
    """Serves the trajectories of one worker."""

    def __init__(self, config: Config) -> None:
        """Open the port; calls are answered once `serve` runs."""
        self._config = config
        self._sessions: dict[str, AgentEpisode] = {}
        self._socket = socket.create_server(
            ("127.0.0.1", 0), backlog=MAX_WAITING_CONNECTIONS, reuse_port=False
        )
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._app = FastAPI(openapi_url=None)
        self._app.add_api_route("/{path:path}", self._respond_to_socket, methods=["GET", "POST"])

    @contextlib.contextmanager
    def admit(self, ticket_id: int, session: "AgentEpisode") -> Iterator[str]:
        """Yield the key of a trajectory. It identifies the calls of the trajectory until the end of the block."""
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
                self._app,
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

    async def respond(self, action: str, authorization: str, body: bytes) -> Response:
        """Return the answer to a request. If it is cancelled, what was sampled stays in the trajectory.

        `action` is the method and the path, such as `GET /v1/models`.
        """
        try:
            session = self._session_of(authorization)
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
            match action:
                case "GET /v1/models":
                    return _in_json({"object": "list", "data": [self._model()]})
                case str(path) if path.startswith("GET /v1/models/"):
                    return _in_json(self._model())
                case "POST /v1/chat/completions":
                    return await self._answer(session, parse(ChatRequest, body))
                case "POST /v1/completions":
                    return await self._answer(session, parse(TextRequest, body))
            raise RequestError(f"Unknown request URL: {action}.", 404)
        except RequestError as error:
            return _in_json(error.body, error.status)

    async def _answer(
        self, session: "AgentEpisode", request: ChatRequest | TextRequest
    ) -> Response:
        request.check_sampling(self._config)
        call = session.start_call(request)
        try:
            await asyncio.wait({call})
        finally:
            if not call.done():
                await session.give_up(call)
        response = await call
        if not request.stream:
            return _in_json(response)
        with_usage = bool((request.stream_options or {}).get("include_usage"))
        return Response(as_stream(response, with_usage), media_type="text/event-stream")

    def _model(self) -> dict:
        return {"id": self._config.model, "object": "model", "created": 0, "owned_by": "asyncrl"}

    def _session_of(self, authorization: str) -> "AgentEpisode":
        kind, _, key = authorization.partition(" ")
        session = self._sessions.get(key.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise RequestError(
                "Incorrect API key provided. It is that of one trajectory, and ends with it.",
                401,
                code="invalid_api_key",
            )
        return session

    async def _respond_to_socket(self, request: Request) -> Response:
        """Answer a request that came by the port, unless its client leaves before."""
        action = f"{request.method} {request.url.path}"
        body = await _read_body(request)
        responding = asyncio.create_task(
            self.respond(action, request.headers.get("authorization", ""), body)
        )
        left = asyncio.create_task(_wait_until_gone(request))
        await asyncio.wait({responding, left}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not responding.done():
            responding.cancel()
            await asyncio.wait({responding})
            return Response()
        return responding.result()


class InProcessTransport(httpx2.AsyncBaseTransport):
    """Carries calls to an endpoint of the same process, without a socket.

    It may be used in another thread than the endpoint. The endpoint answers in the event loop of `loop`.
    """

    def __init__(self, endpoint: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self._endpoint = endpoint
        self._loop = loop

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the endpoint's answer."""
        action = f"{request.method} {request.url.path}"
        authorization = request.headers.get("authorization", "")
        responding = self._endpoint.respond(action, authorization, await request.aread())
        future = asyncio.run_coroutine_threadsafe(responding, self._loop)
        response = await asyncio.wrap_future(future)
        return httpx2.Response(
            response.status_code, headers=response.raw_headers, content=response.body
        )


class _Server(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _in_json(fields: dict, status: int = 200) -> Response:
    """Return an answer in JSON: as ASCII text, because a policy can write half of a character."""
    return Response(json.dumps(fields), status, media_type="application/json")


async def _read_body(request: Request) -> bytes:
    """Return the body, or the beginning of one that is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            break
    return bytes(body)


def _too_large() -> RequestError:
    return RequestError(
        f"The request's body has more than {MAX_BODY_BYTES} bytes.", 413, code="request_too_large"
    )


async def _wait_until_gone(request: Request) -> None:
    receive: Callable = request.receive
    while (await receive())["type"] != "http.disconnect":
        pass
