"""What a kill -9 or a full disk costs: this memory, and Mem0 with FAISS as documented.

    nice python .bench/crash.py [--trials 500] [--seed 1]

A trial is a process that works on a folder, killed 0 to 300 ms after its first work, and
a second process that opens the folder again; five trials in a row share one folder. Ours:
four sessions of two users, turn after turn, learning and index files meanwhile; what
counts is each turn whose save() has returned. Mem0: `AsyncMemory.from_config`, its own
FAISS store and SQLite history, against a local endpoint, one call after the other; what
counts is each add(), update() and delete() that has returned. The disk is full by
RLIMIT_FSIZE: no file may grow beyond a share of what the main one (memory.json, Mem0's
index) has. On a real disk, what Mem0 has truncated would be free again.
"""

import argparse
import asyncio
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import platform
import re
import resource
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
scratch = tempfile.TemporaryDirectory()
os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": scratch.name}  # before Mem0

import faiss
from mem0 import AsyncMemory
from mem0.vector_stores.faiss import FAISS

import memory

DIMENSION = 1536  # Mem0's default
LONGEST = 0.3  # seconds until a kill
LIVES = 5  # on one folder
SESSIONS = [(user, str(uuid.UUID(int=n))) for user in ("ann", "bob") for n in (1, 2)]
LIKE = re.compile(r"I like (\w+)(?:, not (\w+)| (no more))?")


def vector(text: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    found = np.random.default_rng(seed).standard_normal(DIMENSION, "float32")
    return found / np.linalg.norm(found)


def differ(found: np.ndarray, text: str) -> bool:
    return not np.allclose(found, vector(text), atol=1e-4)


def fact(word: str) -> str:
    return f"User likes {word}."


def change(query: str) -> tuple[str | None, str | None]:
    """Return the fact that a query ends and the one that it begins."""
    new, old, over = LIKE.fullmatch(query).groups()
    old, new = (new, None) if over else (old, new)
    return old and fact(old), new and fact(new)


def next_query(random: Random, liked: list[str], word: str) -> str:
    if not liked or random.random() < 0.6:
        liked.append(word)
        return f"I like {word}"
    old = liked.pop(random.randrange(len(liked)))
    if random.random() < 0.5:
        return f"I like {old} no more"
    liked.append(word)
    return f"I like {word}, not {old}"


# --- Ours ---


async def complete(messages: Any, schema: dict[str, Any]) -> str:
    """Learn by one rule: the operations between the facts known and those after the turns."""
    await asyncio.sleep(0.002)
    asked = json.loads(messages[-1]["content"])
    if schema["name"] == "session_summary":
        return json.dumps({"summary": f"{len(asked['turns'])} turns. " * 20})
    known = {row["text"]: row["id"] for row in asked["facts"]}
    after: dict[Any, tuple[Any, Any, str]] = {}  # by the text now: id, text, evidence
    for turn in asked["turns"]:
        old, new = change(turn["query"])
        id = after.pop(old)[0] if old in after else known.get(old)
        after[new or turn["query"]] = id, new, turn["query"]
    operations = []
    for id, text, evidence in after.values():
        if id is not None or text:
            op = "add" if id is None else "update" if text else "delete"
            row = {"op": op, "id": id, "text": text, "kind": "episodic"}
            operations.append(row | {"importance": 0.7, "evidence": evidence})
    return json.dumps({"operations": operations})


async def embed(texts: list[str]) -> list[np.ndarray]:
    return [vector(text) for text in texts]


async def opened(folder: Path) -> memory.Memory:
    """Open a memory that does often what it does seldom."""
    memory.LEARN_DELAY, memory.FILE_TURNS = 0.005, 6
    settings = memory.Settings(history_turns=2)
    service = memory.Memory(folder, complete, embed, "random", settings=settings)
    service.learner.context_tokens = 1 << 16  # all facts are shown to the rule
    await service.open()
    return service


async def say(service: memory.Memory, user: str, session: str, query: str) -> None:
    row = {"response": "Noted.", "status": "complete", "reasoning_mode": False}
    row |= {"rounds": 1, "tools": [], "started_at": memory.now()}
    async with service.turn(user, session) as turn:
        await turn.hints(query)
        await turn.save(query=query, **row)
    tell("ack", user, session, query)


async def our_life(folder: Path, life: str, seed: int) -> None:
    service = await opened(folder)
    tell("ready")

    async def talk(n: int, user: str, session: str) -> None:
        random, liked = Random(f"{seed}/{n}"), []
        for turn in count():
            query = next_query(random, liked, f"w{life}s{n}n{turn}")
            await say(service, user, session, query)

    async def save_indexes() -> None:
        random = Random(seed)
        while True:
            await asyncio.sleep(random.uniform(0.01, 0.05))
            for user in {user for user, _ in SESSIONS if (folder / user).exists()}:
                with suppress(memory.NotFound):
                    for file in (memory.FACTS, memory.MESSAGES):
                        await service.learner.embed_missing(user, file)

    talks = (talk(n, *place) for n, place in enumerate(SESSIONS))
    await asyncio.gather(*talks, save_indexes())


async def our_words(folder: Path) -> tuple[Any, Any, Path]:
    service = await opened(folder)

    async def like(word: str) -> None:
        await say(service, *SESSIONS[0], f"I like {word}")

    return like, functools.partial(settled, service), folder / "ann/memory.json"


async def settled(service: memory.Memory) -> None:
    """Wait until nothing is left to learn."""
    deadline = time.monotonic() + 20
    while any(service.folder.glob("*/*.unlearned")):
        if time.monotonic() > deadline:
            return tell("unlearned")
        await asyncio.sleep(0.005)


async def our_check(folder: Path, acknowledged: list[list[str]]) -> None:
    """Learn what waits, then compare what is there with what was acknowledged."""

    found = Counter(unreadable=unreadable(folder, read_checked))
    service = await opened(folder)
    await settled(service)
    await service.close()
    found["unreadable"] += unreadable(folder, read_checked)
    for user in {user for user, _ in SESSIONS if (folder / user).exists()}:
        expected: set[str] = set()
        if not (folder / user / "memory.json").exists():  # killed in its first turn
            found["lost"] += sum(told[1] == user for told in acknowledged)
            continue
        for session in (session for owner, session in SESSIONS if owner == user):
            told = [a[3] for a in acknowledged if a[1:3] == [user, session]]
            parts = (folder / user).glob(f"{session}*.json")
            parts = sorted(parts, key=lambda path: (len(path.name), path.name))
            # After a kill two files may hold the same turns, and only the very same.
            rows = [row for path in parts for row in table(path, "turns")]
            turns = list(
                {json.dumps(row, sort_keys=True): row for row in rows}.values()
            )
            turns.sort(key=lambda row: row["turn"])
            said = [turn["query"] for turn in turns]
            found["lost"] += len(set(told) - set(said))
            found["doubled"] += len(said) - len(set(said))
            ordered = [query for query in said if query in set(told)] == told
            numbered = [turn["turn"] for turn in turns] == [*range(1, len(said) + 1)]
            found["out of order"] += not (ordered and numbered)
            for old, new in map(change, said):
                expected = expected - {old} | ({new} if new else set())
        await asyncio.to_thread(check_facts, folder / user, expected, found)
    tell("found", found, acknowledged)


def read_checked(content: Any) -> None:
    if hashlib.sha256(content[:-32]).digest() != content[-32:].tobytes():
        raise ValueError("no checksum")
    faiss.deserialize_index(content[:-32])


def table(path: Path, name: str) -> list[dict[str, Any]]:
    return list(json.loads(path.read_bytes()).get(name, {}).values())


def check_facts(folder: Path, expected: set[str], found: Counter[str]) -> None:
    facts = table(folder / "memory.json", "facts")
    texts = Counter(row["text"] for row in facts)
    found["facts lost"] += len(expected - set(texts))
    found["back"] += len(set(texts) - expected)
    found["facts doubled"] += sum(row["frequency"] > 1 for row in facts)
    found["facts doubled"] += texts.total() - len(texts)
    history = table(folder / "memory.json", "history")
    rows = ((row["memory_id"], row["new_memory"]) for row in history)
    found["out of step"] |= replayed(rows) != {row["id"]: row["text"] for row in facts}
    files = memory.IndexedFiles(folder, model="random")
    vectors = files.vectors(memory.FACTS)
    for id, entry in files.entries(memory.FACTS).items():
        if id in vectors:
            found["wrong vectors"] += differ(vectors[id], entry.text)


# --- Mem0, as its documentation sets it up ---


class Endpoint(BaseHTTPRequestHandler):
    """OpenAI's embeddings and chat completions: a memory is what the user likes."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/embeddings"):
            rows = enumerate(vector(text).tolist() for text in asked["input"])
            data = [
                {"object": "embedding", "index": n, "embedding": v} for n, v in rows
            ]
            answer = {"object": "list", "data": data, "model": "m"}
        else:
            [*_, word] = re.findall(r"I like (\w+)", asked["messages"][-1]["content"])
            content = json.dumps({"memory": [{"id": "0", "text": fact(word)}]})
            reply = {"role": "assistant", "content": content}
            choice = {"index": 0, "message": reply, "finish_reason": "stop"}
            answer = {"id": "x", "object": "chat.completion", "created": 0}
            answer |= {"model": "m", "choices": [choice]}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


# A process of its own serves it.
server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)


def documented(folder: Path) -> AsyncMemory:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    model = {"model": "m", "api_key": "x", "openai_base_url": url}
    store = {"collection_name": "memories", "path": str(folder / "faiss")}
    return AsyncMemory.from_config({
        "llm": {"provider": "openai", "config": model},
        "embedder": {"provider": "openai", "config": model},
        "vector_store": {"provider": "faiss", "config": store},
        "history_db_path": str(folder / "history.db"),
    })  # fmt: skip


async def memories(store: AsyncMemory) -> dict[str, str]:
    found = await store.get_all(filters={"user_id": "ann"}, top_k=100_000)
    return {row["id"]: row["memory"] for row in found["results"]}


async def mem0_life(folder: Path, life: str, seed: int) -> None:
    random, store = Random(seed), documented(folder)
    known = [*await memories(store), await mem0_add(store, f"w{life}")]  # ready
    for n in count():
        if not known or random.random() < 0.6:
            tell("try", None, fact(f"w{life}n{n}"))
            known.append(await mem0_add(store, f"w{life}n{n}"))
            continue
        id = known.pop(random.randrange(len(known)))
        if random.random() < 0.5:
            tell("try", id, None)
            await store.delete(id)
            tell("ack", id, None)
        else:
            new = fact(f"w{life}n{n}")
            tell("try", id, new)
            await store.update(id, new)
            tell("ack", id, new)
            known.append(id)


async def mem0_add(store: AsyncMemory, word: str) -> str:
    [row] = (await store.add(f"I like {word}", user_id="ann"))["results"]
    tell("ack", row["id"], row["memory"])
    return row["id"]


async def mem0_words(folder: Path) -> tuple[Any, Any, Path]:
    like = functools.partial(mem0_add, documented(folder))
    return like, functools.partial(asyncio.sleep, 0), folder / "faiss/memories.faiss"


async def mem0_check(folder: Path, acknowledged: list[list[str]]) -> None:
    """Compare the memories with the calls that returned, and with those that were tried."""
    found = Counter(unreadable=unreadable(folder, faiss.deserialize_index))
    # As get_all() would list them, which takes a whole AsyncMemory.
    index = FAISS("memories", str(folder / "faiss"))
    now = {id: row["data"] for id, row in index.docstore.items()}
    with sqlite3.connect(folder / "history.db") as history:
        query = "SELECT memory_id, new_memory FROM history ORDER BY rowid"
        recorded = replayed(history.execute(query))
    expected = replayed((id, text) for kind, id, text in acknowledged if kind == "ack")
    # The call under way may have been carried out or not; an add's id is unknown.
    after = expected | {
        id: text for kind, id, text in acknowledged[-1:] if kind == "try"
    }
    lost = [id for id in expected if now.get(id) not in (expected[id], after[id])]
    more = [id for id in now.keys() - after.keys() if now[id] not in after.values()]
    found["lost"], found["back"] = len(lost), len(more)
    found["doubled"] = len(now) - len(set(now.values()))
    found["all lost"] = len(expected) > 1 and not now.keys() & expected.keys()
    total = index.index.ntotal if index.index else 0
    found["out of step"] = recorded != now or total != len(now)
    for row, id in index.index_to_id.items():
        if row < total and id in now:
            found["wrong vectors"] += differ(index.index.reconstruct(row), now[id])
    tell("found", found, [("ack", id, text) for id, text in now.items()])


# --- Both ---


def tell(*row: Any) -> None:
    os.write(1, json.dumps(row).encode() + b"\n")


def unreadable(folder: Path, read_vectors: Callable[[Any], Any]) -> int:
    bad = 0
    for path in folder.rglob("*.*"):
        try:
            if path.suffix in (".json", ".meta"):
                json.loads(path.read_bytes())
            if path.suffix == ".faiss":
                read_vectors(np.frombuffer(path.read_bytes(), "uint8"))
        except (ValueError, RuntimeError):
            bad += 1
        bad += "corrupt" in path.name
    return bad


def replayed(rows: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Return the texts that remain by id, after rows of id and new text (None: deleted)."""
    return {id: text for id, text in dict(rows).items() if text}


async def until_full(words: Any, folder: Path, part: float) -> None:
    """Say 30 words, then 3 more while no file can grow beyond a part of the main one's size."""
    like, settle, file = await words(folder)
    for n in range(30):
        await like(f"old{n}")
    await settle()
    tell("full")
    room, (_, most) = file.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(room * part), most))
    for n in range(3):
        try:
            await like(f"new{n}")
        except Exception as error:  # noqa: BLE001  (whichever: it is counted)
            tell("error", type(error).__name__)


def run(life: float | None, act: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a coroutine function in a process, killed `life` seconds after it is ready; return what it told."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        status = 1
        try:
            os.dup2(write, 1)
            asyncio.run(act(*arguments))
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as output:
        first = output.readline()
        if life is not None:
            time.sleep(life)
            os.kill(pid, signal.SIGKILL)
        told = first + output.read()
    status = os.waitpid(pid, 0)[1]
    assert status == (0 if life is None else signal.SIGKILL), f"{act} ended: {status}"
    return [json.loads(line) for line in told.splitlines()]


def trials(number: int, seed: int, live: Any, check: Any) -> Counter[str]:
    """Kill and look, so many times; a folder with a fault is not used again."""
    total, random, folder, acknowledged = Counter(), Random(seed), Path(), []
    for n in range(number):
        if n % LIVES == 0 or not folder.name:
            folder, acknowledged = Path(tempfile.mkdtemp(dir=scratch.name)), []
        life = random.uniform(0, LONGEST)
        told = run(life, live, folder, f"{n}l", random.randrange(1 << 30))
        told = [row for row in told if row[0] in ("ack", "try")]
        [*_, (_, found, acknowledged)] = run(None, check, folder, acknowledged + told)
        total["trials"] += 1
        total["acknowledged"] += sum(row[0] == "ack" for row in told)
        total.update(found)
        if any(found.values()):
            total["trials with a fault"] += 1
            folder = Path()
    return total


def full_disk(part: float, words: Any, check: Any) -> str:
    folder = Path(tempfile.mkdtemp(dir=scratch.name))
    told = run(None, until_full, words, folder, part)
    kinds = [row[0] for row in told]
    old, all_ = kinds.index("full"), [row for row in told if row[0] == "ack"]
    lost = [run(None, check, folder, rows)[-1][1] for rows in (told[:old], all_)]
    before, both = (found["lost"] + found.get("facts lost", 0) for found in lost)
    return (
        f"{kinds.count('error')} of 3 refused, {len(all_) - old} acknowledged"
        f" ({both - before} of them lost), {before} of {old} older ones lost"
    )


ROWS = """trials, acknowledged, lost, all lost, doubled, out of order, unreadable, facts lost,
back, facts doubled, out of step, wrong vectors, trials with a fault, seconds"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    server.handle_error = lambda *_: None  # clients are killed
    endpoint = multiprocessing.get_context("fork").Process(target=server.serve_forever)
    endpoint.start()
    documented(Path(tempfile.mkdtemp(dir=scratch.name)))  # imports, before the forks
    systems = {
        "ours": (our_life, our_check, our_words),
        "Mem0": (mem0_life, mem0_check, mem0_words),
    }
    columns, disk = [], []
    for name, (live, check, words) in systems.items():
        begun = time.monotonic()
        columns.append(trials(given.trials, given.seed, live, check))
        columns[-1]["seconds"] = round(time.monotonic() - begun)
        for part in (0, 0.5):
            found = full_disk(part, words, check)
            disk.append(f"disk full, files up to {part:.0%}, {name}: {found}")
    endpoint.terminate()
    names = [f"{name} {version(name)}" for name in ("mem0ai", "faiss-cpu", "tinydb")]
    python = platform.python_version()
    print(f"{os.cpu_count()} cores, Python {python},", ", ".join(names))
    print(f"{'':>20}", *(f"{name:>10}" for name in systems))
    for name in " ".join(ROWS.split()).split(", "):
        print(f"{name:>20}", *(f"{column[name]:>10}" for column in columns))
    print(*disk, sep="\n")


if __name__ == "__main__":
    logging.disable()
    with scratch:
        main()
