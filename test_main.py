"""Tests through HTTP, against a model endpoint that is a real server, with real files.

`python test_main.py` starts the service together with that stand-in endpoint, so that
the README's `curl` lines work where no model is at hand.
"""

import asyncio
import base64
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__" or "DATA_DIR" not in os.environ:
    # Read at import; each test has a folder of its own all the same.
    os.environ.setdefault(
        "DATA_DIR", "data" if __name__ == "__main__" else tempfile.mkdtemp()
    )

import httpx
import numpy as np
import pytest
import uvicorn
from tinydb import TinyDB

# --- The stand-in endpoint ---


class StandIn:
    """An OpenAI-compatible server that streams, calls tools and learns by simple rules.

    Tests put what it shall answer into `replies` (one for each streamed request) and
    `operations` (one for each learning), and read what it was asked from `requests`.
    """

    def __init__(self):
        self.replies: deque = (
            deque()
        )  # SSE events, as dicts or bytes; or (status, body)
        self.operations: deque = (
            deque()
        )  # answers to learnings: str, list or (status, body)
        self.requests: list[dict] = []  # streamed
        self.learnings: list[dict] = []
        self.summaries: list[dict] = []
        self.embedded: list[list[str]] = []
        self.closed = 0  # streams that the client has left
        self.gate = threading.Event()  # streams wait at WAIT until it's set
        self.hold_learning = threading.Event()  # learnings wait while it's cleared
        self.hold_learning.set()
        self.embeddings_down = False
        self.pause = 0.0  # seconds between tokens
        self.headers: list[dict] = []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = json.loads(body) if body else {}
        self.headers.append(dict(scope["headers"]))
        path = scope["path"]
        if path.endswith("/models"):
            model = {"id": "stand-in", "object": "model", "max_model_len": 8192}
            await self.json(send, {"object": "list", "data": [model]})
        elif path.endswith("/embeddings"):
            await self.embed(request, send)
        elif path.endswith("/chat/completions"):
            answer = self.stream if request.get("stream") else self.complete
            await answer(request, send, receive)
        else:
            await self.json(send, {"error": {"message": "no such route"}}, 404)

    async def json(self, send, value, status=200):
        headers = [(b"content-type", b"application/json")]
        await send(
            {"type": "http.response.start", "status": status, "headers": headers}
        )
        content = json.dumps(value).encode()
        await send({"type": "http.response.body", "body": content})

    async def embed(self, request, send):
        self.embedded.append(request["input"])
        if self.embeddings_down:
            await self.json(send, {"error": {"message": "down"}}, 500)
            return
        data = []
        for n, text in enumerate(request["input"]):
            vector = bag_of_words(text)
            encoded = base64.b64encode(vector.tobytes()).decode()
            if request.get("encoding_format") != "base64":
                encoded = vector.tolist()
            data.append({"object": "embedding", "index": n, "embedding": encoded})
        await self.json(send, {"object": "list", "data": data, "model": "bag"})

    async def complete(self, request, send, receive):
        format_ = (request.get("response_format") or {}).get("json_schema") or {}
        if format_.get("name") == "session_summary":
            self.summaries.append(request)
            asked = json.loads(request["messages"][-1]["content"])
            told = [asked["previous"], *(turn["query"] for turn in asked["turns"])]
            content = json.dumps({"summary": " / ".join(filter(None, told))[-400:]})
        else:
            self.learnings.append(request)
            while not self.hold_learning.is_set():
                await asyncio.sleep(0.01)
            content = self.operations.popleft() if self.operations else None
            if isinstance(content, tuple):
                await self.json(send, content[1], content[0])
                return
            if content is None:
                content = learn(json.loads(request["messages"][-1]["content"]))
            if isinstance(content, list):
                content = json.dumps({"operations": content})
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        await self.json(send, {"id": "x", "object": "chat.completion", "created": 0,
                               "model": "stand-in", "choices": [choice]})  # fmt: skip

    async def stream(self, request, send, receive):
        self.requests.append(request)
        reply = self.replies.popleft() if self.replies else improvise(request)
        if isinstance(reply, tuple):
            await self.json(send, reply[1], reply[0])
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        left = asyncio.ensure_future(receive())
        for event in reply:
            while event is WAIT and not self.gate.is_set() and not left.done():
                await asyncio.sleep(0.005)
            if left.done():
                self.closed += 1
                return
            if event is WAIT:
                continue
            if event is CUT:
                raise ConnectionError("the stand-in breaks off")
            if not isinstance(event, bytes):
                event = b"data: " + json.dumps(event).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(self.pause)
        left.cancel()
        await send({"type": "http.response.body", "body": b""})


WAIT, CUT = object(), object()
END = b"data: [DONE]\n\n"


def chunk(delta=None, finish_reason=None, **more):
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more}


USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def says(*texts, finish_reason="stop"):
    """Return a stream that answers in plain text."""
    usage = {"choices": [], "usage": USAGE}
    pieces = [chunk({"content": text}) for text in texts]
    role = chunk({"role": "assistant", "content": ""})
    return [role, *pieces, chunk(finish_reason=finish_reason), usage, END]


def calls(*wanted, text=""):
    """Return a stream that calls tools, each given as (name, arguments)."""
    pieces = [chunk({"content": text})] if text else []
    for n, (name, arguments) in enumerate(wanted):
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        id = f"call_{uuid.uuid4().hex[:8]}"
        head = {"index": n, "id": id, "type": "function"}
        head["function"] = {"name": name, "arguments": ""}
        pieces.append(chunk({"tool_calls": [head]}))
        for start in range(0, len(written), 7):
            part = {"arguments": written[start : start + 7]}
            pieces.append(chunk({"tool_calls": [{"index": n, "function": part}]}))
    return [*pieces, chunk(finish_reason="tool_calls"), END]


def bag_of_words(text):
    """Return a vector in which texts that share words are near each other."""
    vector = np.zeros(256, "<f4")
    for word in re.findall(r"\w+", text.lower()):
        seed = int(hashlib.md5(word.encode()).hexdigest()[:8], 16)
        vector += np.random.default_rng(seed).standard_normal(256).astype("<f4")
    return vector if vector.any() else vector + 1


def improvise(request):
    """Answer like a simple model: from the hints, or with a tool where it is asked for one."""
    last = request["messages"][-1]
    if last["role"] == "tool":
        return says("The result ", "is ", last["content"], ".")
    if request.get("tool_choice") == "none":
        return says("That is all I have.")
    notes, _, message = last["content"].partition("[/MEMORY HINTS]")
    message = message.strip()
    offered = {tool["function"]["name"] for tool in request.get("tools", [])}
    sum_ = re.search(r"\d[\d\s.]*[-+*/^][-+*/^\d\s.()]*\d", message)
    if sum_ and "calculate" in offered:
        return calls(("calculate", {"expression": sum_[0]}), text="Let me calculate. ")
    if re.search(r"what time|which time", message, re.I) and "current_time" in offered:
        return calls(("current_time", {"timezone": "UTC"}))
    if message.endswith("?"):
        words = {w for w in re.findall(r"\w{4,}", message.lower())}
        lines = re.findall(r'^- "?(.*?)"?$', notes, re.M)
        found = [n for n in lines if words & set(re.findall(r"\w{4,}", n.lower()))]
        if found:
            return says("I remember: ", *(f"{line} " for line in found))
        return says("I ", "do ", "not ", "know ", "that ", "yet.")
    return says("Noted", ": ", *(f"{word} " for word in message.split()[:12]))


def learn(asked):
    """Learn by simple rules what a real model learns by reading."""
    facts, operations = {f["text"]: f["id"] for f in asked["facts"]}, []

    def put(op, evidence, text=None, id=None, kind="profile"):
        operations.append({"op": op, "id": id, "text": text, "kind": kind,
                           "importance": 0.7, "evidence": evidence})  # fmt: skip

    def one_value(evidence, start, text):
        old = next((id for known, id in facts.items() if known.startswith(start)), None)
        put("update" if old is not None else "add", evidence, text, old)

    for turn in asked["turns"]:
        query = turn["query"]
        if m := re.search(r"\bI use (.+?)(?: as (.+?))?[.!]?$", query):
            for name in re.split(r",| and ", m[1]):
                role = f" as a {m[2].removesuffix('s')}" if m[2] else ""
                put("add", m[0], f"User uses {name.strip()}{role}.")
        if m := re.search(
            r"I don't use (\w+) any ?more|forget (?:that I use )?(\w+)", query
        ):
            gone = (m[1] or m[2]).lower()
            for text, id in facts.items():
                if gone in text.lower():
                    put("delete", m[0], id=id)
        if m := re.search(r"my name is (\w+)", query, re.I):
            one_value(m[0], "User's name", f"User's name is {m[1]}.")
        if m := re.search(r"I (?:live in|moved to) (\w+)", query):
            one_value(m[0], "User lives", f"User lives in {m[1]}.")
        if m := re.search(r"I like (\w+)", query):
            put("add", m[0], f"User likes {m[1]}.", kind="episodic")
    return json.dumps({"operations": operations})


# --- Servers and clients ---


class Server:
    """An ASGI application on a real socket, in a thread of this process."""

    def __init__(self, app, **options):
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        options = {"log_level": "warning", "lifespan": "auto"} | options
        self.server = uvicorn.Server(uvicorn.Config(app, **options))
        self.thread = threading.Thread(
            target=self.server.run, args=([self.socket],), daemon=True
        )

    def __enter__(self):
        self.thread.start()
        wait_for(lambda: self.server.started or not self.thread.is_alive())
        assert self.thread.is_alive(), "the server did not start"
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
        self.socket.close()


def wait_for(condition, seconds=20):
    """Wait until something has happened, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return value


A, B, C = (str(uuid.UUID(int=n)) for n in (1, 2, 3))  # sessions


class Chat:
    """A client of the service, and a look at its folder."""

    def __init__(self, url, folder):
        self.url, self.folder = url, Path(folder)
        self.http = httpx.Client(base_url=url, timeout=30)

    def post(self, message, session=A, user="ann", **more):
        body = {"user_id": user, "session_id": session, "message": message, **more}
        return self.http.post("/chat", json=body)

    def ask(self, message, session=A, user="ann", **more):
        """Return the events of one turn."""
        reply = self.post(message, session, user, **more)
        assert reply.status_code == 200, reply.text
        return [json.loads(line) for line in reply.text.splitlines()]

    def facts(self, user="ann", **query):
        reply = self.http.get(f"/users/{user}/memories", params=query)
        return [fact["text"] for fact in reply.json()["memories"]]

    def learned(self, user="ann", folder=None):
        """Wait until all that was said is learned."""
        lock = self.folder / ".locks" / (folder or user)
        wait_for(lambda: lock.exists() and lock.stat().st_size == 0)

    def tables(self, file, user="ann"):
        with TinyDB(self.folder / user / file) as db:
            return {name: db.table(name).all() for name in db.tables()}

    def turns(self, session=A, user="ann"):
        return self.tables(f"{session}.json", user)["turns"]


def of(events, type):
    return [event for event in events if event["type"] == type]


def answer(events):
    assert events[-1]["type"] == "done", events[-1]
    return events[-1]["response"]


def hints(request):
    """Return the notes that a request put before the model."""
    block, _, _ = request["messages"][-1]["content"].partition("[/MEMORY HINTS]")
    return block


@pytest.fixture
def model():
    stand_in = StandIn()
    with Server(stand_in) as server:
        stand_in.url = server.url + "/v1"
        yield stand_in


@pytest.fixture
def start(model, tmp_path, monkeypatch):
    """Return a function that runs the service in this process with given settings."""
    import main
    import memory

    @contextmanager
    def run(folder=tmp_path / "data", **settings):
        known = {"BASE_URL": model.url, "OPENAI_API_KEY": "EMPTY", "CHAT_MODEL": ""}
        known |= {"EMBEDDING_BASE_URL": model.url, "EMBEDDING_MODEL": "bag"}
        with monkeypatch.context() as patch:
            patch.setattr(memory, "DATA_DIR", Path(folder))
            for name, value in (known | settings).items():
                patch.setattr(main if hasattr(main, name) else memory, name, value)
            with Server(main.app) as server:
                chat = Chat(server.url, folder)
                chat.service = main.app.state.service
                yield chat

    return run


@pytest.fixture
def chat(start):
    with start() as chat:
        yield chat


# --- The main job ---


def test_an_answer_streams_as_events_and_ends_in_done(chat, model):
    model.replies.append(says("Hello ", "Ann."))

    events = chat.ask("Hi!")

    assert [e["type"] for e in events] == ["memory", "token", "token", "done"]
    assert events[0] == {"type": "memory", "facts": [], "pending": 0, "degraded": []}
    assert events[1] == {"type": "token", "round": 1, "text": "Hello "}
    assert events[-1] == {
        "type": "done", "response": "Hello Ann.", "turn": 1, "rounds": 1,
        "finish_reason": "stop", "usage": USAGE,
    }  # fmt: skip


def test_the_story_of_shram_and_magnet(chat, model):
    chat.ask("I use Shram and Magnet as productivity tools", session=A)
    at_once = answer(chat.ask("What are the productivity tools that I use?", session=B))
    assert "Shram" in at_once and "Magnet" in at_once
    chat.learned()
    later = chat.ask("What are the productivity tools that I use?", session=B)
    assert "Shram" in answer(later) and "Magnet" in answer(later)
    assert len(of(later, "memory")[0]["facts"]) == 2

    chat.ask("I don't use Magnet anymore", session=B)
    chat.learned()
    last = answer(chat.ask("What are the productivity tools that I use?", session=C))

    assert "Shram" in last and "Magnet" not in last
    assert "Magnet" not in hints(model.requests[-1])
    assert chat.facts() == ["User uses Shram as a productivity tool."]
    assert [f["text"] for f in chat.tables("memory.json")["facts"]] == chat.facts()


if __name__ == "__main__":
    stand_in = StandIn()
    stand_in.pause = 0.03
    with Server(stand_in) as endpoint:
        url = f"{endpoint.url}/v1"
        os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "EMPTY"}
        os.environ |= {
            "EMBEDDING_BASE_URL": url,
            "CHAT_MODEL": "",
            "EMBEDDING_MODEL": "",
        }
        print(
            f"The model is a stand-in that follows simple rules, at {url}.", flush=True
        )
        uvicorn.run("main:app", port=int(os.environ.get("PORT", "8000")))
