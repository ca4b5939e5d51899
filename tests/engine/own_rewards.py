"""Reward functions as a user would write them, good ones and bad ones."""

import asyncio
import contextlib
import ctypes
import os
import socket
import time


def exact(response, answer):
    return response == answer


def keywords(response, **row):
    return float(len(row))


def by_columns(response, length, colour="red"):
    return float(length + (colour == "blue"))


def parts(response, answer, **row):
    return {"right": float(response == answer), "short": 0.5}


def short(response):
    return 1 / len(response)


def broken(response):
    """Returns, or does, what the response says."""
    match response.split():
        case ["nan"]:
            return float("nan")
        case ["text"]:
            return "1.0"
        case ["list"]:
            return [1.0, 0.0]
        case ["nothing"]:
            return None
        case ["empty"]:
            return {}
        case ["bad", "part"]:
            return {"right": 1.0, "wrong": float("inf")}
        case ["text", "part"]:
            return {"right": "1.0"}
        case ["bad", "name"]:
            return {3: 1.0}
        case ["long", "name"]:
            return {"x" * 1000: 1.0}
        case ["taken"]:
            return {"mean": 1.0}
        case ["many"]:
            return {str(i): 1.0 for i in range(1000)}
        case ["raise"]:
            return {}["no such key"]
        case ["surrogates"]:
            raise ValueError("\ud800" * 1000)
        case ["large", exponent]:
            return -(10.0 ** int(exponent))
        case ["large", "part", exponent]:
            return {"large": 10.0 ** int(exponent)}
        case ["exit"]:
            raise SystemExit(3)
        case ["leave"]:
            os._exit(0)
        case ["killed"]:
            ctypes.string_at(0)
        case ["hang"]:
            time.sleep(3600)
    return 0.5


async def one_second(response, **row):
    await asyncio.sleep(1)
    return float(response)


async def broken_async(response, **row):
    match response.split():
        case ["hang"]:
            await asyncio.sleep(3600)
        case ["deaf"]:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
        case ["connect", port]:
            # looked up by a thread
            _, writer = await asyncio.open_connection("localhost", int(port))
            writer.close()
            return 1.0
    await asyncio.sleep(0.2)
    return broken(response)


class Judge:
    async def __call__(self, response, answer):
        await asyncio.sleep(0)
        return {"wise": 2.0}


judge = Judge()


def connect(response, answer):
    socket.create_connection(("127.0.0.1", int(response)), timeout=1)
    return 1.0


number = 3


def no_response(completion, answer):
    return 0.0


class OwnTask:
    @staticmethod
    def score(answer, response):
        return {"right": float(response == answer), "digits": len(response) / len(answer)}
