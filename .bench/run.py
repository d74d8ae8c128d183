"""Speed, side by side: this service, a plain pass-through, and Mem0's documented loop.

    python .bench/run.py [--quick] [--only start,compare,more,costs]

A scripted endpoint (first token after 50 ms, 40 tokens 2 ms apart, embeddings 15 ms,
extraction 300 ms) and the servers run as real processes, each by `uvicorn … --log-level
warning`, a round of each in turn. A client is a user of its own who speaks without a
pause; clients, endpoint and server share the machine's cores. Figures are medians of the
rounds; ratios are taken within a round. Mem0's loop plays one. The endpoint has no limit,
so the service learns with LEARN_CONCURRENCY=64 here; its default of 4, which spares a real
model, would be all that is measured: LEARN_CONCURRENCY=4 python .bench/run.py

The endpoint and the clients need `pip install uvloop`; the servers run without it.
"""

import argparse
import asyncio
import base64
import itertools
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, ClassVar

import numpy as np
import uvloop

HERE = Path(__file__).resolve().parent
FIRST_TOKEN, GAP, TOKENS = 0.050, 0.002, 40  # seconds, seconds, a reply
EMBEDDING, EXTRACTION = 0.015, 0.300  # seconds
DIMENSION = 1536
CHATS = {1: 16, 16: 640, 64: 1280, 256: 1536}  # a round, by clients
FEWER = {1: 6, 16: 32, 64: 64, 256: 256}  # for Mem0, which manages 10 a second
ROUNDS = 3
PATIENCE = 120.0  # seconds for a round

WORDS = ["Quite"] + [f" word{n}" for n in range(2, TOKENS)] + [" finis."]
THINGS = """sofa lamp bike piano clock radio kettle desk kayak drum violin rug vase tent
camera mirror stove carpet bench guitar"""
THINGS = THINGS.split()
SAYS = re.compile(r"\bmy (\w+) comes from (\w+)")


def message(user: str, turn: int) -> str:
    """Return what a user says in a turn, and nobody else: 20 things, then each anew."""
    random = Random(f"{user}/{turn}")
    place = "".join(random.choice("BDKLMNRST") + random.choice("aeiou") for _ in "1234")
    said = f"By the way, my {THINGS[turn % len(THINGS)]} comes from {place.title()}."
    return f"{said} What would you tell a guest about that place?"


Row = dict[str, float]  # of the table, by column


# --- The endpoint ---


def frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk(
    delta: dict[str, str], finish_reason: str | None = None, **more: Any
) -> bytes:
    head = {"id": "chatcmpl-5d3c", "object": "chat.completion.chunk", "created": 1}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    data = head | {"model": "scripted", "choices": [choice]} | more
    return frame(b"data: " + json.dumps(data).encode() + b"\n\n")


USAGE = {"prompt_tokens": 500, "completion_tokens": TOKENS, "total_tokens": 540}
PIECES = [chunk({"content": word}) for word in WORDS]
PIECES[0] = chunk({"role": "assistant", "content": ""}) + PIECES[0]
PIECES[-1] += chunk({}, "stop")
USED = chunk({}, choices=[], usage=USAGE)
END = frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
STREAM = OK % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n"


def vector_pool() -> list[tuple[str, str]]:
    """Return vectors as they stand in a reply, as base64 and as numbers."""
    drawn = np.random.default_rng(1).standard_normal((512, DIMENSION), "float32")
    encoded = [f'"{base64.b64encode(row.tobytes()).decode()}"' for row in drawn]
    return list(zip(encoded, [json.dumps(row.tolist()) for row in drawn], strict=True))


class Endpoint(asyncio.Protocol):
    """A connection to the scripted endpoint; the class is what all of them share.

    One ticker writes what is due of every stream: a timer a token would be the bottleneck.
    """

    streams: ClassVar[dict[Any, list[Any]]] = {}  # when it begins, tokens sent, usage
    calls: ClassVar[Counter[str]] = Counter()
    prompts: ClassVar[list[str]] = []  # of streamed requests, the latest
    vectors: ClassVar[list[tuple[str, str]]] = []
    ticking = False

    def connection_made(self, transport: Any) -> None:
        self.transport, self.data, self.used = transport, b"", False

    def connection_lost(self, error: Exception | None) -> None:
        self.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        if found and len(body) >= size:
            self.data = body[size:]
            self.answer(head.split(b" ", 2)[1], body[:size])

    def answer(self, path: bytes, body: bytes) -> None:
        request = json.loads(body) if body else {}
        if path.startswith(b"/v1/") and not self.used:
            self.used = True
            self.calls["connect"] += 1
        if path in (b"/calls", b"/health"):
            self.reply(self.calls)
        elif path == b"/prompts":
            self.reply(self.prompts)
            self.prompts.clear()
        elif path == b"/v1/models":
            self.reply({"data": [{"id": "scripted", "max_model_len": 32768}]})
        elif path == b"/v1/embeddings":
            self.calls["embed"] += 1
            LOOP.call_later(EMBEDDING, self.send, self.embeddings(request))
        elif request.get("stream"):
            self.calls["chat"] += 1
            self.prompts.append(body.decode())
            del self.prompts[:-100]
            used = bool((request.get("stream_options") or {}).get("include_usage"))
            self.transport.write(STREAM)
            self.streams[self] = [LOOP.time() + FIRST_TOKEN, 0, used]
            self.start()
        else:
            self.calls["learn"] += 1
            said = {"role": "assistant", "content": json.dumps(learned(request))}
            choice = {"index": 0, "message": said, "finish_reason": "stop"}
            reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "-"}
            reply |= {"choices": [choice], "usage": USAGE}
            LOOP.call_later(EXTRACTION, self.reply, reply)

    def reply(self, value: Any) -> None:
        self.send(json.dumps(value).encode())

    def send(self, body: bytes) -> None:
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        self.transport.write(OK % b"application/json" + length + body)

    def embeddings(self, request: dict[str, Any]) -> bytes:
        texts, rows = request["input"], []
        plain = request.get("encoding_format") != "base64"
        for index, text in enumerate([texts] if isinstance(texts, str) else texts):
            vector = self.vectors[zlib.crc32(text.encode()) % len(self.vectors)][plain]
            rows.append(f'{{"index":{index},"embedding":{vector}}}')
        return f'{{"data":[{",".join(rows)}],"usage":{json.dumps(USAGE)}}}'.encode()

    @classmethod
    def start(cls) -> None:
        if not cls.ticking:
            cls.ticking = True
            LOOP.call_later(GAP, cls.tick)

    @classmethod
    def tick(cls) -> None:
        now, cls.ticking = LOOP.time(), False
        for self, stream in list(cls.streams.items()):
            began, sent, used = stream
            due = min(TOKENS, int((now - began) / GAP) + 1) if now >= began else 0
            if due > sent:
                stream[1], data = due, b"".join(PIECES[sent:due])
                if due == TOKENS:
                    del cls.streams[self]
                    data += (USED if used else b"") + END
                self.transport.write(data)
        if cls.streams:
            cls.start()


def learned(request: dict[str, Any]) -> dict[str, Any]:
    """Return what there is to learn, in the form that this service or Mem0 asks for."""
    asked = request["messages"][-1]["content"]
    form = request.get("response_format") or {}
    name = (form.get("json_schema") or {}).get("name")
    if name == "session_summary":
        last = json.loads(asked)["turns"][-1]["query"]  # no summary is like another
        return {"summary": "They spoke of where things come from. " * 10 + last}
    if name != "memory_operations":
        thing, place = SAYS.findall(asked)[-1]
        text = f"User's {thing} comes from {place}"
        return {"memory": [{"id": "0", "text": text, "attributed_to": "user"}]}
    asked, operations = json.loads(asked), []
    known = {fact["text"].split(" comes")[0]: fact["id"] for fact in asked["facts"]}
    for turn in asked["turns"]:
        said = SAYS.search(turn["query"])
        operation = {"evidence": said[0], "kind": "episodic", "importance": 0.6}
        operation |= {"text": f"User's {said[1]} comes from {said[2]}"}
        id = known.get(f"User's {said[1]}")
        operation |= {"op": "add" if id is None else "update", "id": id}
        operations.append(operation)
    return {"operations": operations}


async def serve_endpoint(port: int) -> None:
    global LOOP
    LOOP = asyncio.get_running_loop()
    Endpoint.vectors = vector_pool()
    server = await LOOP.create_server(Endpoint, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


# --- The baselines, as one would write them ---


def plain(memory: Any = None) -> Any:
    """Return a pass-through: a message in, tokens out as NDJSON, by FastAPI and AsyncOpenAI.

    With `memory` it is the loop of Mem0's documentation: search, chat, add.
    """
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    app, client = FastAPI(), AsyncOpenAI()
    adds: set[asyncio.Task[Any]] = set()

    class Chat(BaseModel):
        user_id: str
        message: str

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"adding": len(adds)}

    @app.post("/chat")
    async def chat(body: Chat) -> StreamingResponse:
        return StreamingResponse(answer(body), media_type="application/x-ndjson")

    async def answer(body: Chat) -> Any:
        system, text = "You are a helpful assistant.", ""
        if memory:
            filters = {"user_id": body.user_id}
            found = await memory.search(query=body.message, filters=filters, top_k=3)
            known = "\n".join(f"- {entry['memory']}" for entry in found["results"])
            system += f" Answer based on query and memories.\nUser Memories:\n{known}"
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": body.message},
        ]
        stream = await client.chat.completions.create(
            model="scripted", messages=messages, stream=True
        )
        async for chunk in stream:
            if chunk.choices and (piece := chunk.choices[0].delta.content):
                text += piece
                yield json.dumps({"type": "token", "text": piece}) + "\n"
        if memory:
            messages.append({"role": "assistant", "content": text})
            adds.add(task := asyncio.create_task(memory.add(messages, **filters)))
            task.add_done_callback(adds.discard)
            if not os.environ.get("ADD_LATER"):
                await task
        yield json.dumps({"type": "done"}) + "\n"

    return app


def mem0() -> Any:
    from mem0 import AsyncMemory

    store = {"path": os.environ["MEM0_DIR"] + "/faiss", "embedding_model_dims": 1536}
    config = {"vector_store": {"provider": "faiss", "config": store}}
    return plain(AsyncMemory.from_config(config))


# --- Processes ---


AS_INSTALLED = "--http", "h11", "--loop", "asyncio", "--log-level", "warning"
COMMANDS = {
    "direct": [str(HERE / "run.py"), "--endpoint"],  # the endpoint itself
    "plain": ["-m", "uvicorn", "run:plain", "--factory", *AS_INSTALLED],
    "service": ["-m", "uvicorn", "main:app", *AS_INSTALLED],
    "Mem0": ["-m", "uvicorn", "run:mem0", "--factory", *AS_INSTALLED],
}
COMMANDS["Mem0, later"] = COMMANDS["Mem0"]


class Server:
    """One of COMMANDS as a process; `seconds` is what it took to its first answer."""

    turns_a_session = 10

    def __init__(self, kind: str, root: Path, settings: dict[str, str]):
        self.kind, self.turns = kind, Counter[str]()  # turns by user
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = root / f"{kind}-{self.port}"
        self.folder.mkdir()
        own = {name: str(self.folder / name) for name in ("DATA_DIR", "MEM0_DIR")}
        own["PYTHONPATH"] = str(HERE)  # plain and mem0, for uvicorn
        own |= {"ADD_LATER": "1"} if "later" in kind else {}
        self.log, began = self.folder / "log", time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *COMMANDS[kind], "--port", str(self.port)],
                env=os.environ | settings | own,
                cwd=HERE.parent,  # `python -m` imports from there before anywhere else
                stdout=log,
                stderr=log,
            )
        self.proc = Path(f"/proc/{self.process.pid}")
        while not self.answers():
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text())
            time.sleep(0.01)
        self.seconds = time.perf_counter() - began

    def answers(self) -> bool:
        with suppress(OSError):
            return self.get("/health") is not None
        return False

    def get(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)

    def cpu(self) -> float:
        """Return the seconds of CPU that all its threads have used."""
        fields = (self.proc / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def megabytes(self, name: str) -> float:
        """Return VmHWM, the most memory so far, or VmRSS, that of now."""
        status = (self.proc / "status").read_text()
        return int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024

    def learning(self) -> bool:
        """Tell whether anything waits to be learned; the service notes it in files."""
        if self.kind == "service":
            return any((self.folder / "DATA_DIR").glob("*/*.unlearned"))
        return self.kind == "Mem0, later" and self.get("/health")["adding"] > 0

    async def learned(self) -> None:
        while self.learning():
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Bench:
    """The endpoint, and the servers that are started beside it."""

    def __init__(self, root: Path):
        self.root, self.running = root, []
        self.settings: dict[str, str] = {}
        self.endpoint = self.start("direct")
        self.settings = {
            "OPENAI_BASE_URL": f"http://127.0.0.1:{self.endpoint.port}/v1",
            "OPENAI_API_KEY": "none",
            "CHAT_MODEL": "scripted",
            "EMBEDDING_MODEL": "text-embedding-3-small",
            "MEM0_TELEMETRY": "False",
            "LEARN_CONCURRENCY": os.environ.get("LEARN_CONCURRENCY", "64"),
        }

    def start(self, kind: str, **settings: str) -> Server:
        self.running.append(Server(kind, self.root, self.settings | settings))
        return self.running[-1]

    def stop(self, *servers: Server) -> None:
        for server in servers or list(self.running):
            self.running.remove(server)
            server.stop()


# --- The load ---


class Connection(asyncio.Protocol):
    """A client's connection, kept alive; of an answer it reads as little as can be."""

    reply: asyncio.Future[float] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(error or ConnectionResetError("closed"))

    def fail(self, error: Exception) -> None:
        if self.reply and not self.reply.done():
            self.reply.set_exception(error)

    async def chat(self, request: bytes) -> float:
        """Return the seconds to the first token, when the last one has come."""
        self.reply = asyncio.get_running_loop().create_future()
        self.tail, self.first, self.whole = b"", 0.0, False
        self.began = time.perf_counter()
        self.transport.write(request)
        return await self.reply

    def data_received(self, data: bytes) -> None:
        if not self.tail and not data.startswith(b"HTTP/1.1 200"):
            return self.fail(ValueError(data[:200]))
        data = self.tail + data
        if not self.first and WORDS[0].encode() in data:
            self.first = time.perf_counter() - self.began
        self.whole = self.whole or WORDS[-1].encode() in data
        self.tail = data[-16:]
        if data.endswith(b"\r\n0\r\n\r\n"):
            if self.whole:
                self.reply.set_result(self.first)
            else:
                self.fail(ValueError(data[-300:]))


def next_request(server: Server, user: str) -> bytes:
    turn, path = server.turns[user], "/chat"
    server.turns[user] += 1
    text = message(user, turn)
    body: dict[str, Any] = {"user_id": user, "message": text}
    if server.kind == "direct":
        prompt = [{"role": "system", "content": "You are a helpful assistant."}]
        prompt.append({"role": "user", "content": text})
        body = {"model": "scripted", "messages": prompt, "stream": True}
        path = "/v1/chat/completions"
    elif server.kind == "service":
        name = f"{user}/{turn // server.turns_a_session}"
        body["session_id"] = str(uuid.uuid5(uuid.NAMESPACE_URL, name))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


async def play(server: Server, endpoint: Server, work: list[list[str]]) -> Row:
    """Let clients chat side by side, and return the columns of COLUMNS that are one round's.

    Args:
        work: For each client the users as whom it speaks, one chat after the other.
    """
    loop, first = asyncio.get_running_loop(), []
    address = "127.0.0.1", server.port
    connect = [loop.create_connection(Connection, *address) for _ in work]
    connections = [protocol for _, protocol in await asyncio.gather(*connect)]

    async def client(connection: Connection, users: list[str]) -> None:
        for user in users:
            first.append(await connection.chat(next_request(server, user)))

    calls = Counter(endpoint.get("/calls"))
    used, began = [server.cpu(), endpoint.cpu()], time.perf_counter()
    async with asyncio.timeout(PATIENCE):
        load = time.process_time()
        async with asyncio.TaskGroup() as group:
            for connection, users in zip(connections, work, strict=True):
                group.create_task(client(connection, users))
        load, answered = time.process_time() - load, time.perf_counter() - began
        learning = server.learning()
        await server.learned()
        seconds = time.perf_counter() - began if learning else answered
    for connection in connections:
        connection.transport.close()
    await asyncio.sleep(0.3)  # what stands behind the last learning is work too
    n, ranked = len(first), sorted(first)
    row = {"chats/s": n / seconds, "answers/s": n / answered}
    row |= {f"p{p}": 1000 * ranked[n * p // 100] for p in (50, 95, 99)}
    row |= {"load": 1000 * load / n, "CPU": 1000 * (server.cpu() - used[0]) / n}
    row |= {"endpoint": 1000 * (endpoint.cpu() - used[1]) / n}
    row["CPU"] = row["load"] if server is endpoint else row["CPU"]
    row["MB"] = server.megabytes("VmHWM")
    calls = Counter(endpoint.get("/calls")) - calls
    return row | {name: calls[name] / n for name in CALLS}


# --- The measurements ---

CALLS = ("chat", "learn", "embed", "connect")
COLUMNS = (
    "chats/s",
    "answers/s",
    "of direct",
    "of plain",
    "p50",
    "p95",
    "p99",
    "added",
)
COLUMNS = (*COLUMNS, "CPU", "MB", *CALLS)
LEGEND = """
chats/s: until all is learned; answers/s: until the last is answered; p50, p95, p99: ms to
the first token; added: p50 over direct's; CPU: ms a chat, learning included (direct: the
load's own); MB: the most so far; then calls of the endpoint, and connections to it, a chat
"""


async def compare(bench: Bench, quick: bool, kinds: list[str]) -> None:
    servers = {kind: bench.start(kind) for kind in kinds}
    for server in servers.values():
        await play(server, bench.endpoint, [["warm"] * 3, ["up"] * 3])
    servers = {"direct": bench.endpoint} | servers
    used, chats = servers["service"].cpu(), 0
    print(LEGEND, f"{'':16}", *(f"{name:>9}" for name in COLUMNS))
    for clients in CHATS:
        rows: dict[str, list[Row]] = {kind: [] for kind in servers}
        for round in range(1 if quick else ROUNDS):
            for kind, server in servers.items():
                few = (FEWER if "Mem0" in kind else CHATS)[clients] // clients
                few = max(1, few // 4) if quick else few
                if round and "Mem0" in kind:
                    continue  # it is slow enough
                work = [[f"user-{clients}-{n}"] * few for n in range(clients)]
                try:
                    rows[kind].append(await play(server, bench.endpoint, work))
                except (ExceptionGroup, TimeoutError, OSError) as error:
                    if "Mem0" not in kind:
                        raise
                    servers[kind] = restarted(bench, server, clients, error)
                chats += clients * few if kind == "service" else 0
        table(clients, rows)
    facts = servers["service"].get("/users/user-16-0/memories")["memories"]
    await asyncio.sleep(26)  # the service writes its index files
    spent = 1000 * (servers["service"].cpu() - used) / chats
    print(
        f"\nThe service's CPU a chat, idling and index files included: {spent:.1f} ms;"
    )
    print(f"one of the 16 users has {len(facts)} facts")
    bench.stop(*list(servers.values())[1:])


def restarted(bench: Bench, server: Server, clients: int, error: Any) -> Server:
    time.sleep(0.5)
    code = server.process.poll()
    ended = f"the process ended by signal {-code}" if code else repr(error)[:200]
    print(f"{clients:3} {server.kind:12} failed: {ended}")
    bench.stop(server)
    return bench.start(server.kind)


def table(clients: int, rows: dict[str, list[Row]]) -> None:
    for kind, found in rows.items():
        if not found:
            continue
        for row, direct, plain in zip(
            found, rows["direct"], rows["plain"], strict=False
        ):
            row["of direct"] = row["chats/s"] / direct["chats/s"]
            row["of plain"] = row["chats/s"] / plain["chats/s"]
            row["added"] = row["p50"] - direct["p50"]
        cells = [median(row[name] for row in found) for name in COLUMNS]
        shown = (f"{cell:9.{1 if abs(cell) >= 10 else 2}f}" for cell in cells)
        print(f"{clients:3} {kind:12}", *shown, flush=True)
    own = [median(row[name] for row in rows["direct"]) for name in ("load", "endpoint")]
    print(
        f"    in it: load {own[0]:.2f}, endpoint {own[1]:.2f} ms of CPU a direct chat"
    )


async def more(bench: Bench, quick: bool) -> None:
    """Memory of users who have gone quiet, and meanwhile the prefix cache."""
    users = [f"idle-{n}" for n in range(200 if quick else 1000)]
    server = bench.start("service", LEARN_CONCURRENCY="32")
    await play(server, bench.endpoint, [["warm"] * 9] * 16)
    before = server.megabytes("VmRSS")
    await play(server, bench.endpoint, [users[n::16] for n in range(16)])
    busy = server.megabytes("VmRSS")
    await asyncio.gather(prefix(bench, quick), asyncio.sleep(26))  # index files written
    each = [
        1000 * (mb - before) / len(users) for mb in (busy, server.megabytes("VmRSS"))
    ]
    print(
        f"\n1,000 users after a turn each, learned: {each[0]:.0f} MB; idle, their indexes"
        f"\nwritten: {each[1]:.0f} MB, over {before:.0f} MB ({len(users)} measured; memory.CACHE_BYTES bounds it)"
    )


async def prefix(bench: Bench, quick: bool) -> None:
    """Tell how much of each prompt a prefix cache knows, in one session, each turn learned."""
    server = bench.start("service")
    server.turns_a_session = 100
    bench.endpoint.get("/prompts")
    for _ in range(20 if quick else 50):
        await play(server, bench.endpoint, [["prefix"]])
    prompts = [json.loads(body) for body in bench.endpoint.get("/prompts")]
    shares, folds, broken = [], 0, 0
    for old, new in itertools.pairwise(prompts):
        *kept, _ = old["messages"]
        same = new["messages"][: len(kept)] == kept and new["tools"] == old["tools"]
        folded = new["messages"][0] != old["messages"][0]
        folds += folded
        broken += not same and not folded
        pair = [json.dumps([p["tools"], p["messages"]]) for p in (old, new)]
        shares.append(len(os.path.commonprefix(pair)) / len(pair[1]))
    print(
        f"\nPrefix reuse, {len(prompts)} turns of one session: {sum(shares) / len(shares):.0%} of a"
        f"\nprompt stood in the one before; {folds} folds, {broken} violations between folds"
    )


def start(bench: Bench, quick: bool) -> None:
    print("\nSeconds from the start to the first answer of /health, median of 3")
    for kind in ("plain", "service", "Mem0"):
        servers = []
        for _ in range(1 if quick else 3):
            servers.append(bench.start(kind))
            bench.stop(servers[-1])
        print(
            f"{kind:13} {median(server.seconds for server in servers):.2f}", flush=True
        )


def machine() -> Iterator[str]:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    yield f"{os.cpu_count()} cores, {model[1] if model else platform.machine()}"
    yield f"load {os.getloadavg()[0]:.2f} at the start, Python {platform.python_version()}"
    packages = ("fastapi", "uvicorn", "openai", "mem0ai", "faiss-cpu", "tinydb")
    yield ", ".join(f"{name} {version(name)}" for name in packages)
    names = [
        name for name in os.environ if re.match("LEARN_|HINT_|HISTORY_|MAX_", name)
    ]
    yield f"settings: {' '.join(f'{n}={os.environ[n]}' for n in names) or 'defaults'}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument(
        "--later", action="store_true", help="Mem0 with add in a task too"
    )
    parser.add_argument("--only", default="start,compare,more,costs")
    parser.add_argument("--endpoint", action="store_true", help="be the endpoint")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    if arguments.endpoint:
        return uvloop.run(serve_endpoint(arguments.port))
    print(*machine(), sep="\n")
    kinds = ["plain", "service", "Mem0"] + ["Mem0, later"] * arguments.later
    parts, began = arguments.only.split(","), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            if "start" in parts:
                start(bench, arguments.quick)
            if "compare" in parts:
                uvloop.run(compare(bench, arguments.quick, kinds))
            if "more" in parts:
                uvloop.run(more(bench, arguments.quick))
        finally:
            bench.stop()
    if "costs" in parts:
        subprocess.run([sys.executable, HERE / "costs.py"], check=True)
    print(f"\nAll this took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
