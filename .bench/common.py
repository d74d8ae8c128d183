"""What the scripts of this folder share: a scripted model, real services, figures.

    python .bench/common.py --port 8001     # the scripted model alone

The model learns by RULES, and answers a question from the hints that share a word with
it. With `--tokens 40` it always gives the same answer of 40 tokens.
"""

import argparse
import asyncio
import base64
import functools
import importlib.metadata
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
import memory

Row = dict[str, Any]
DIMENSION = 1536  # OpenAI's, and Mem0's default
WORD_VECTORS = np.random.default_rng(1).standard_normal((512, DIMENSION), "float32")
UVICORN = ("-m", "uvicorn", "--log-level=warning", "--timeout-graceful-shutdown=10")


# --- What the scripted model says and learns ---

RULES = (  # what is said, how the fact begins that ends, and the new fact
    (r"I (?:do not|don't) (use|like) (\w+) any ?more", r"User \1s \2", ""),
    (r"I like (\w+) instead of (\w+)", r"User likes \2", r"User likes \1."),
    (r"I like (?!\w+ instead)([^.!?]+)", "", r"User likes \1."),
    (r"I use (\w+)(?: and \w+)? as (.+?)s$", "", r"User uses \1 as a \2."),
    (r"I use \w+ and (\w+) as (.+?)s$", "", r"User uses \1 as a \2."),
    (r"I use (\w+)[.!]?$", "", r"User uses \1."),
    (r"[Mm]y name is (\w+)", "User's name", r"User's name is \1."),
    (r"my (\w+) comes from (\w+)", r"User's \1", r"User's \1 comes from \2."),
)


def changes(message: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rules that match: the quote, the fact that ends and the new fact."""
    for pattern, ended, new in RULES:
        if match := re.search(pattern, message):
            yield match[0], match.expand(ended), match.expand(new)


def learn(asked: Row) -> list[Row]:
    """Return the operations that lead from the known facts to those after the turns."""
    known = {fact["text"]: {"id": fact["id"]} for fact in asked["facts"]}
    operations: dict[str, Row] = {}  # by the text that is then a fact
    for quote, ended, text in (c for t in asked["turns"] for c in changes(t["query"])):
        ends = re.compile(re.escape(ended or "nothing") + r"\b").match
        old = next(filter(ends, [*operations, *known]), "")
        id = (operations.pop(old, None) or known.pop(old, {"id": None}))["id"]
        op = "add" if id is None else "update" if text else "delete"
        if op != "add" or text:
            kind = "episodic" if "like" in quote else "profile"
            row = {"op": op, "id": id, "text": text or None, "kind": kind}
            operations[text or str(id)] = row | {"evidence": quote, "importance": 0.7}
    return list(operations.values())


async def complete(messages: list[Row], schema: Row | None) -> str:
    """Return what a model answers that is asked for JSON, by this service or Mem0."""
    text = str(messages[-1]["content"])
    if not schema:
        [*_, said] = re.findall(r"I like \w+|my \w+ comes from \w+", text)
        [(_, _, fact)] = changes(said)
        return json.dumps({"memory": [{"id": "0", "text": fact}]})
    asked = json.loads(text)
    if schema["name"] == "memory_operations":
        return json.dumps({"operations": learn(asked)})
    if schema["name"] == "session_summary":
        return json.dumps({"summary": f"At last: {asked['turns'][-1]['query']}"})
    # Nothing is still true of a fact that ended. The whole message says a new one.
    return json.dumps({"left": None, "said": asked["message"]})


async def embed(texts: list[str]) -> list[np.ndarray]:
    """Return unit vectors. Texts that share words are near each other."""
    words = [re.findall(r"\w+", text.casefold()) or [""] for text in texts]
    rows = [[zlib.crc32(w.encode()) % len(WORD_VECTORS) for w in ws] for ws in words]
    sums = [WORD_VECTORS[row].sum(0) for row in rows]
    return [total / np.linalg.norm(total) for total in sums]


def chat_answer(request: Row) -> list[bytes]:
    """Return the chunks of an answer: words from the hints, or a tool call."""
    last = request["messages"][-1]
    hints, _, message = str(last["content"]).strip().rpartition("[/MEMORY HINTS]")
    if isinstance(request.get("tool_choice"), dict):
        return tool_call("plan", {"steps": ["look", "answer"]})
    if last["role"] == "tool":
        return spoken("The result is ", f"{message}.")
    if request.get("tools") and (m := re.search(r"Recall (\w+)", message)):
        return tool_call("search_conversations", {"query": m[1]})
    if not message.endswith("?"):
        return spoken("Noted: ", *(f"{word} " for word in message.split()[:12]))
    lines = re.findall(r'^- "?(.*?)"?$', hints, re.MULTILINE)
    found = [f"{line} " for line in lines if memory.share_word(message, line)]
    if not found:
        return spoken("I ", "do ", "not ", "know ", "that ", "yet.")
    return spoken("I remember: ", *reversed(found))  # the newest fact comes last


def frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk(delta: Row, finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    data = {"id": "c", "object": "chat.completion.chunk", "created": 1}
    data |= {"model": "scripted", "choices": [choice]} | more
    return frame(b"data: " + json.dumps(data).encode() + b"\n\n")


@functools.lru_cache(maxsize=10_000)
def spoken(*words: str) -> list[bytes]:
    return [*(chunk({"content": word}) for word in words), chunk({}, "stop")]


def tool_call(name: str, arguments: Row) -> list[bytes]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"index": 0, "id": f"call_{time.time_ns()}", "function": function}
    return [chunk({"tool_calls": [call]}), chunk({}, "tool_calls")]


OK = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
STREAM = OK % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n"
END = frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
USED = chunk({}, choices=[], usage=USAGE)


async def serve(script: Row, reader: Any, writer: Any) -> None:
    """Answer the requests of a connection. FastAPI would take longer for each."""
    with suppress(ConnectionError, EOFError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            request = json.loads(body or "{}")
            if request.get("stream"):
                await stream(script, request, writer)
            else:
                content = json.dumps(await answer(script, head, request)).encode()
                size = b"Content-Length: %d\r\n\r\n" % len(content)
                writer.write(OK % b"application/json" + size + content)
    writer.close()


async def answer(script: Row, head: bytes, request: Row) -> Row:
    reply: Row = {"model": "scripted", "usage": USAGE, "id": "1", "created": 1}
    if b"/embeddings" in head:
        await asyncio.sleep(script["embedding"])
        texts, rows = request["input"], []
        texts = [texts] if isinstance(texts, str) else texts
        for n, v in enumerate(await embed(texts)):
            in_base64 = request.get("encoding_format") == "base64"
            sent = base64.b64encode(v.tobytes()).decode() if in_base64 else v.tolist()
            rows.append({"index": n, "embedding": sent})
        return reply | {"data": rows}
    if b"/completions" in head:
        await asyncio.sleep(script["learning"])
        schema = (request.get("response_format") or {}).get("json_schema")
        content = await complete(request["messages"], schema)
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return reply | {"object": "chat.completion", "choices": [choice]}
    return {"data": [{"id": "scripted", "max_model_len": 32768}]}


async def stream(script: Row, request: Row, writer: Any) -> None:
    chunks = chat_answer(request)
    if script["tokens"]:
        chunks = spoken("Quite", *[" so"] * (script["tokens"] - 2), " finis.")
    if (request.get("stream_options") or {}).get("include_usage"):
        chunks = [*chunks, USED]
    writer.write(STREAM)
    await asyncio.sleep(script["first_token"])
    for piece in [*chunks, END]:
        if not writer.is_closing():
            writer.write(piece)
            await asyncio.sleep(script["gap"])


SCRIPT = {"port": 8001, "tokens": 0, "first_token": 0.05, "gap": 0.002}
SCRIPT |= {"embedding": 0.015, "learning": 0.3}  # delays are seconds


async def serve_model(**script: Any) -> None:
    script = SCRIPT | script
    answering, address = functools.partial(serve, script), ("127.0.0.1", script["port"])
    server = await asyncio.start_server(answering, *address, limit=1 << 24)
    await server.serve_forever()


# --- Processes ---


class Process:
    """A server in a process of its own, which has started and answers."""

    def __init__(self, command: Any, log: Path, code: Path = ROOT, **settings: str):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings["PATH"] = os.environ["PATH"]
        command = [sys.executable, *command, f"--port={port}"]
        with open(log, "ab") as output:
            known = {"stdout": output, "stderr": output, "env": settings}
            self.process = subprocess.Popen(command, cwd=code, **known)
        self.pid = self.process.pid
        while self.process.poll() is None:
            with suppress(httpx.HTTPError):
                httpx.get(f"{self.url}/health", timeout=10)
                return
            time.sleep(0.02)
        raise RuntimeError(log.read_text()[-3000:])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def model(folder: Path, *flags: str) -> Process:
    """Start a scripted model. Use it with `contextlib.closing`, as the next."""
    return Process([__file__, *flags], folder / "model.log")


def service(folder: Path, code: Path = ROOT, **settings: str) -> Process:
    """Start a real service with settings. Its data is in `folder / "data"`."""
    settings = {"DATA_DIR": str(folder / "data")} | settings
    return Process([*UVICORN, "main:app"], folder / "service.log", code, **settings)


def model_settings(url: str) -> dict[str, str]:
    """Return the settings of a service that asks the scripted model."""
    url, key = f"{url}/v1", "none"
    return {"OPENAI_BASE_URL": url, "EMBEDDING_BASE_URL": url, "OPENAI_API_KEY": key}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def process_stats(pid: int) -> tuple[float, float, int, int]:
    """Return a process's seconds of CPU, its MB, threads and open files."""
    proc = Path(f"/proc/{pid}")
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
    cpu, rss = ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGESIZE") / 1e6
    return cpu, rss, int(fields[17]), len(os.listdir(proc / "fd"))


async def ask(http: Any, user: str, session: str, message: str, **more: Any) -> Any:
    """Yield the events of a turn. Raises httpx.HTTPError if it is refused or cut."""
    body = {"user_id": user, "session_id": session, "message": message, **more}
    async with http.stream("POST", "/chat", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            yield json.loads(line)


async def wait_until_learned(http: httpx.AsyncClient, seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while (await http.get("/health")).json()["pending"]:
            await asyncio.sleep(0.1)


def mem0_as_documented(folder: Path, url: str, dimension: int = DIMENSION) -> Any:
    """Return Mem0 with FAISS as its documentation sets it up, and the model at a URL.

    Set MEM0_DIR and MEM0_TELEMETRY before: Mem0 reads both when it is imported.
    """
    from mem0 import AsyncMemory

    config = {"model": "scripted", "api_key": "none", "openai_base_url": f"{url}/v1"}
    store = {"collection_name": "memories", "path": str(folder / "faiss")}
    store["embedding_model_dims"] = dimension
    whole: Row = {"vector_store": {"provider": "faiss", "config": store}}
    whole |= {
        part: {"provider": "openai", "config": config} for part in ("llm", "embedder")
    }
    return AsyncMemory.from_config(whole | {"history_db_path": f"{folder}/history.db"})


# --- Options and figures ---


def options(description: str, **defaults: Any) -> argparse.Namespace:
    """Return the command line's flags, each of its default's type."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        one = default[0] if isinstance(default, list) else default
        more: Row = {"type": type(one), "nargs": "+" if one is not default else None}
        more = {"action": "store_true"} if default is False else more
        parser.add_argument(f"--{name}", default=default, **more)
    return parser.parse_args()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print figures as Markdown, with the machine and the command that repeats them."""
    print(f"\n{machine()}\n")
    for row in (columns, ["---"] * len(columns), *rows):
        cells = (f"{c:.4g}" if isinstance(c, float) else str(c) for c in row)
        print(f"| {' | '.join(cells)} |")
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    print(f"\nRepeat it with: {command}", flush=True)


def machine() -> str:
    """Return one line: the date, the commit, the machine and the packages."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h"]
    found = subprocess.run(git, check=False, capture_output=True, text=True)
    info = Path("/proc/cpuinfo")  # Linux's
    cpu = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    parts = [f"{datetime.now(UTC):%Y-%m-%d}", f"commit {found.stdout.strip() or '?'}"]
    parts += [f"{os.cpu_count()} cores of {cpu[1] if cpu else sys.platform}"]
    parts += [f"Python {sys.version.split()[0]}"]
    names = ("fastapi", "uvicorn", "openai", "mem0ai", "faiss-cpu", "tinydb")
    return ", ".join(parts + [f"{n} {importlib.metadata.version(n)}" for n in names])


if __name__ == "__main__":
    asyncio.run(serve_model(**vars(options(__doc__, **SCRIPT))))
