"""How fast is it, beside a minimal chat without memory and beside Mem0?

    python .bench/speed.py [--rounds 3] [--clients 16 64 256] [--turns N] [--old FOLDER]

All run at the same time as real processes, and play a round in turn. A client is one
user who speaks without a pause, ten turns a session. The scripted model has no limit,
so the service learns with LEARN_CONCURRENCY=64. Its default of 4 spares a real model.
`--old` also measures the code in another folder, such as a checkout of a commit before.
"""

import asyncio
import itertools
import json
import os
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import common
import httpx

BARE, PLAIN, MEM0 = "bare model", "without memory", "Mem0"
COLUMNS = ["clients", "", "answers a second", "first token, ms", "CPU a chat, ms"]
COLUMNS += ["RSS, MB", "answers, of without memory", "added to the bare first token"]


def chat_app() -> Any:
    """Return a service as one writes it with FastAPI and openai.

    With MEM0_DIR it has the loop of Mem0's documentation: search, chat, add.
    """
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    app, client, mem0 = FastAPI(), AsyncOpenAI(), None
    if folder := os.environ.get("MEM0_DIR"):
        url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
        mem0 = common.mem0_as_documented(Path(folder), url)

    class Chat(BaseModel):
        user_id: str
        message: str

    @app.post("/chat")
    async def chat(body: Chat) -> StreamingResponse:
        return StreamingResponse(answer(body), media_type="application/x-ndjson")

    async def answer(body: Chat) -> Any:
        system, text = "You are a helpful assistant.", ""
        filters = {"user_id": body.user_id}
        if mem0:
            found = await mem0.search(query=body.message, filters=filters, top_k=3)
            known = "\n".join(f"- {entry['memory']}" for entry in found["results"])
            system += f" Answer based on query and memories.\nUser Memories:\n{known}"
        messages: Any = [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": body.message})
        request: Any = {"model": "scripted", "messages": messages, "stream": True}
        stream = await client.chat.completions.create(**request)
        async for chunk in stream:
            if chunk.choices and (piece := chunk.choices[0].delta.content):
                text += piece
                yield json.dumps({"type": "token", "text": piece}) + "\n"
        if mem0:
            messages.append({"role": "assistant", "content": text})
            await mem0.add(messages, **filters)
        yield json.dumps({"type": "done"}) + "\n"

    return app


def start(folder: Path, old: str) -> Iterator[tuple[str, common.Process]]:
    """Yield each server's name, and the server when it has started."""
    yield BARE, (model := common.model(folder, "--tokens=40"))
    settings = common.model_settings(model.url)
    more = {"PYTHONPATH": str(Path(__file__).parent), "MEM0_TELEMETRY": "False"}
    command = [*common.UVICORN, "--factory", "speed:chat_app"]
    yield PLAIN, common.Process(command, folder / "plain.log", **settings, **more)
    services = ("this service", common.ROOT), ("old service", Path(old))
    for name, code in services[: 2 if old else 1]:
        data = {"DATA_DIR": str(folder / name), "LEARN_CONCURRENCY": "64"}
        yield name, common.service(folder, code, **settings, **data)
    more["MEM0_DIR"] = str(folder / "mem0")
    yield MEM0, common.Process(command, folder / "mem0.log", **settings, **more)


def chat_request(name: str, user: str, turn: int) -> bytes:
    """Return what a user says in a turn, and nobody else, as an HTTP request."""
    random, path = Random(f"{user}/{turn}"), "/chat"
    place = "".join(random.choice("BDKLMNRST") + random.choice("aeiou") for _ in "1234")
    text = f"By the way, my thing{turn % 20} comes from {place.title()}."
    text += " What would you tell a guest about that place?"
    body: dict[str, Any] = {"user_id": user, "message": text}
    if name == BARE:
        path, messages = "/v1/chat/completions", [{"role": "user", "content": text}]
        body = {"model": "scripted", "messages": messages, "stream": True}
    elif name.endswith("service"):
        session = uuid.uuid5(uuid.NAMESPACE_URL, f"{user}/{turn // 10}")
        body["session_id"] = str(session)
    content = json.dumps(body)  # ASCII
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode()


class Load:
    """Clients of one service, who go on from round to round."""

    def __init__(self, name: str, server: common.Process):
        self.name, self.server = name, server
        self.turns: Counter[str] = Counter()  # by user

    async def client(self, user: str, turns: int) -> list[float]:
        """Chat, and return the seconds to each first token."""
        port, times = int(self.server.url.rpartition(":")[2]), []
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        for _ in range(turns):
            began = time.perf_counter()
            writer.write(chat_request(self.name, user, self.turns[user]))
            if b" 200 " not in (status := await reader.readline()):
                raise ValueError(status)
            await reader.readuntil(b"Quite")
            times.append(time.perf_counter() - began)
            await reader.readuntil(b"\r\n0\r\n\r\n")
            self.turns[user] += 1
        writer.close()
        return times

    async def play(self, clients: int, turns: int) -> dict[str, float]:
        """Let clients chat side by side, and return the figures of the round."""
        spent, *_ = common.process_stats(self.server.pid)
        began = time.perf_counter()
        async with asyncio.timeout(180):
            users = [self.client(f"user-{clients}-{n}", turns) for n in range(clients)]
            first = [*itertools.chain(*await asyncio.gather(*users))]
        seconds, number = time.perf_counter() - began, len(first)
        if self.name.endswith("service"):
            async with httpx.AsyncClient(base_url=self.server.url) as http:
                await common.wait_until_learned(http)
        await asyncio.sleep(0.5)  # for what follows the last learning
        cpu, rss, *_ = common.process_stats(self.server.pid)
        row = {"answers": number / seconds, "first": 1000 * median(first)}
        return row | {"cpu": 1000 * (cpu - spent) / number, "rss": rss}


async def compare(options: Any, folder: Path) -> None:
    rows, loads = [], []
    with ExitStack() as stack:
        for name, server in start(folder, options.old):
            loads.append(Load(name, stack.enter_context(closing(server))))
            await loads[-1].play(2, 3)  # to warm up
        for clients in options.clients:
            figures: dict[str, list[Any]] = {load.name: [] for load in loads}
            turns = options.turns or max(6, 1280 // clients)
            for _, load in itertools.product(range(options.rounds), loads[:-1]):
                figures[load.name].append(await load.play(clients, turns))
            with suppress(OSError, EOFError):  # its process has died at 256 clients
                figures[MEM0].append(await loads[-1].play(clients, 1))
            rows += table_rows(clients, figures)
    common.print_table(COLUMNS, rows)


def table_rows(clients: int, figures: dict[str, Any]) -> list[list[Any]]:
    """Return medians of the rounds. Two services are compared within each round."""
    bare, plain, rows = figures[BARE], figures[PLAIN], []
    for name, rounds in figures.items():
        for row, other, model in zip(rounds, plain, bare, strict=False):
            row["share"] = row["answers"] / other["answers"]
            row["added"] = row["first"] - model["first"]
        columns = zip(*(row.values() for row in rounds), strict=True)
        rows.append([clients, name, *map(median, columns)])
    return rows


def main() -> None:
    options = common.options(__doc__, rounds=3, clients=[16, 64, 256], turns=0, old="")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(options, Path(folder)))


if __name__ == "__main__":
    main()
