"""What is left after hours of load: memory, open files, threads and tasks of the service.

    nice python .bench/soak.py [--minutes 10] [--users 200]

The service runs as uvicorn runs it, the stand-in endpoint of test_main.py in another
process, and eight clients here. What the users own stays bounded (old sessions and now
and then a user are deleted): once it has stopped growing, what grows is a leak. SIGUSR1
makes the service tell its tasks and how much it holds; `--serve PORT` and
`--stand-in PORT` are the two other processes.
"""

import argparse
import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import uvicorn

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

CLIENTS = 8
SAMPLE_SECONDS = 10
THINGS = ("tea", "jazz", "chess", "figs", "maps", "trains", "opera", "moss", "kites")
MESSAGES = (
    *("I like {0}.", "I use {0} and {1} as tools", "I moved to {0}", "my name is {0}"),
    *("I do not use {0} anymore", "forget that I use {0}", "What do I use {0} for?"),
    *("What is 12 * 7?", "What time is it?", "Fetch {0}", "Recall {0}", "Propose {0}"),
    *("Forget {0}", "Tell me of {0} and {1}, and do take your time"),
)


# --- The other two processes ---


def serve(port: int) -> None:
    """Run main:app, and write its tasks to the standard output at each SIGUSR1."""
    import main

    def tell() -> None:
        running = [task.get_coro() for task in asyncio.all_tasks()]
        # The closing of an abandoned async generator has no name.
        names = Counter(getattr(c, "__qualname__", type(c).__name__) for c in running)
        kept = dict(main.app.state.service.memory.cache.kept)
        users = {path.parent for path in kept}
        files = kept.items()
        vectors = sum(len(v) for path, (_, v) in files if path.suffix == ".faiss")
        sizes = [len(users), vectors, len(kept), len(gc.get_objects())]
        print(json.dumps([names, sizes]), flush=True)

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)

    config = uvicorn.Config(main.app, port=port, log_level="error", access_log=False)
    Server(config).run()


def stand_in(port: int) -> None:
    import test_main

    improvise = test_main.improvise

    def answer(request: dict[str, Any]) -> list[Any]:
        """Improvise, plan where it is forced, and use the memory's tools where asked."""
        last, calls = request["messages"][-1], test_main.calls
        if isinstance(request.get("tool_choice"), dict):
            return calls(("plan", {"steps": ["look", "answer"]}))
        word, _, rest = str(last["content"]).rpartition("\n")[2].partition(" ")
        tools = {"Fetch": "fetch_memory", "Recall": "search_conversations"}
        tools |= {"Forget": "forget_memory", "Propose": "propose_memory"}
        if last["role"] == "user" and word in tools:
            items = {"items": [f"User likes {rest}"]}
            return calls((tools[word], items if word == "Propose" else {"query": rest}))
        return improvise(request)

    class Forgetful(test_main.StandIn):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await super().__call__(scope, receive, send)
            for kept in (self.requests, self.learnings, self.summaries):
                kept.clear()
            self.embedded.clear(), self.headers.clear()

    test_main.improvise, model = answer, Forgetful()
    model.pause = 0.005  # seconds between tokens
    config = uvicorn.Config(model, port=port, log_level="error", lifespan="off")
    uvicorn.Server(config).run()


# --- The load ---


class Load:
    """Clients that talk, leave in mid-answer, read slowly, delete and ask for what is not there."""

    def __init__(self, url: str, users: int):
        self.users = users
        limits = httpx.Limits(max_connections=50, max_keepalive_connections=CLIENTS)
        self.http = httpx.AsyncClient(base_url=url, timeout=60, limits=limits)
        self.count: Counter[str] = Counter()
        self.sessions: dict[str, list[str]] = defaultdict(list)

    async def client(self, n: int, until: float) -> None:
        random = Random(n)
        while time.monotonic() < until:
            user, chance = f"user-{random.randrange(self.users)}", random.random()
            own = self.sessions[user]
            if not own or random.random() < 0.2:
                own.append(str(uuid.UUID(int=random.getrandbits(128))))
            await self.turn(random, user, random.choice(own))
            if chance < 0.02:
                self.sessions.pop(user, None)
                await self.expect("DELETE", f"/users/{user}", 204, 404)
            elif len(own) > 3:
                path = f"/users/{user}/sessions/{own.pop(0)}"
                await self.expect("DELETE", path, 204, 404)
            elif chance < 0.2:
                await self.look(random, user, own[-1])
            await asyncio.sleep(random.uniform(0, 0.1))

    async def turn(self, random: Random, user: str, session: str) -> None:
        text = random.choice(MESSAGES).format(*random.sample(THINGS, 2))
        body = {"user_id": user, "session_id": session, "message": text}
        body["reasoning_mode"] = random.random() < 0.15
        manner, end = random.random(), ""
        async with self.http.stream("POST", "/chat", json=body) as reply:
            if manner < 0.05:
                await asyncio.sleep(0.5)  # reads late
            async for line in reply.aiter_lines():
                end = json.loads(line)["type"]
                if end == "token" and manner > 0.9:
                    break
                if manner < 0.1:
                    await asyncio.sleep(0.02)
        self.count["turns"] += 1
        self.count[end if end in ("done", "error") else "left"] += 1

    async def look(self, random: Random, user: str, session: str) -> None:
        memories, nobody = f"/users/{user}/memories", str(uuid.uuid4())
        for path in ("", "/sessions", f"/sessions/{session}", f"/sessions/{nobody}"):
            await self.expect("GET", f"/users/{user}{path}", 200, 404, 405)
        found = await self.expect("GET", f"{memories}?query=tea", 200)
        for fact in found.json()["memories"][:1]:
            await self.expect("GET", f"{memories}/{fact['id']}/history", 200, 404)
            await self.expect("DELETE", f"{memories}/{fact['id']}", 204, 404)
        await self.expect("DELETE", f"{memories}/{nobody}", 404)
        await self.expect("POST", "/chat", 422)
        if random.random() < 0.1:
            await self.expect("DELETE", memories, 204, 404)

    async def expect(self, method: str, path: str, *codes: int) -> httpx.Response:
        reply = await self.http.request(method, path)
        mark = "" if reply.status_code in codes else f" not expected: {path}"
        self.count[f"{reply.status_code}{mark}"] += 1
        return reply


# --- The measurement ---


NAMES = "turns", "RSS MB", "files", "threads", "disk MB", "users", "vectors", "parsed"


def sample(service: subprocess.Popen, folder: Path, turns: int) -> list[float]:
    """Return what NAMES names, and the number of objects that Python's collector knows."""
    pid, disk = service.pid, 0
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    rows = dict(line.split(":", 1) for line in status)
    rss, threads = int(rows["VmRSS"].split()[0]) / 1024, int(rows["Threads"])
    # Not by pathlib, which fails where a folder is deleted meanwhile.
    paths = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    for path in paths:
        with suppress(OSError):
            disk += path.stat().st_size
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return [turns, rss, files, threads, disk / 1e6, *ask(service)[1]]


def ask(service: subprocess.Popen) -> Any:
    """Return the names of the service's tasks with their number, and what it holds."""
    service.send_signal(signal.SIGUSR1)
    return json.loads(service.stdout.readline())


def descriptors(service: subprocess.Popen) -> Counter[str]:
    links = [os.readlink(p) for p in Path(f"/proc/{service.pid}/fd").iterdir()]
    return Counter(link.partition("[")[0] for link in links)


def process(kind: str, port: int, **known: str) -> subprocess.Popen:
    command = [sys.executable, __file__, kind, str(port)]
    known |= {"PATH": os.environ["PATH"]}
    return subprocess.Popen(command, env=known, cwd=ROOT, stdout=subprocess.PIPE)


async def measure(given: Any, service: subprocess.Popen, url: str, folder: Path):
    """Return rows of samples, idle ones first and last, the answers, and the tasks when idle."""
    load = Load(url, given.users)
    while True:
        with suppress(httpx.TransportError):
            await load.http.get("/health")
            break
        await asyncio.sleep(0.1)
    await load.turn(Random(0), "first", str(uuid.uuid4()))
    await load.http.aclose()
    await asyncio.sleep(3)
    before, rows = (ask(service)[0], descriptors(service)), [sample(service, folder, 1)]
    load, until = Load(url, given.users), time.monotonic() + 60 * given.minutes
    clients = [asyncio.create_task(load.client(n, until)) for n in range(CLIENTS)]
    while await asyncio.wait(clients, timeout=min(SAMPLE_SECONDS, 2 * given.minutes)):
        for client in clients:
            if client.done():
                client.result()
        if time.monotonic() > until:
            break
        rows.append(sample(service, folder, load.count["turns"]))
    await asyncio.gather(*clients)
    await load.http.aclose()
    await asyncio.sleep(30)  # learning ends, index files are written
    rows.append(sample(service, folder, load.count["turns"]))
    return rows, load.count, before, (ask(service)[0], descriptors(service))


def report(rows: Any, count: Counter[str], before: Any, after: Any) -> None:
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}; answers: {count}")
    print(f"{'':>12}", *(f"{name:>9}" for name in (*NAMES, "objects")))
    [start, *rows, end] = rows
    table = np.array(rows)
    parts = [(p[-1][0], *np.median(p[:, 1:], 0)) for p in np.array_split(table, 10)]
    lines = {"idle before": start}
    lines |= {f"tenth {n}": part for n, part in enumerate(parts, 1)}
    for name, row in (lines | {"idle after": end}).items():
        print(f"{name:>12}", *(f"{value:9.1f}" for value in row))
    for share, name in ((5, "first fifth"), (2, "first half")):
        steady = table[len(table) // share :]
        line, errors = np.polyfit(steady[:, 0] / 1000, steady[:, 1], 1, cov=True)
        slope = f"{line[0]:+.2f} ± {errors[0][0] ** 0.5:.2f} MB per 1,000 turns"
        print(f"RSS after the {name}: {slope}")
    most = table[:, 2].max()
    print(f"files: {start[2]} idle before, at most {most:.0f}, {end[2]} idle after")
    for name, (tasks, files) in {"before": before, "after": after}.items():
        print(f"idle {name}: tasks {tasks}, files {dict(files)}")
    print("tasks left:", sum(after[0].values()) - sum(before[0].values()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--serve", type=int)
    parser.add_argument("--stand-in", type=int)
    given = parser.parse_args()
    if given.serve:
        return serve(given.serve)
    if given.stand_in:
        return stand_in(given.stand_in)
    own, model = free_ports()
    with tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{model}"
        endpoint = process("--stand-in", model, DATA_DIR=folder)
        known = {"OPENAI_BASE_URL": url, "EMBEDDING_BASE_URL": url}
        service = process("--serve", own, DATA_DIR=folder, **known)
        try:
            url = f"http://127.0.0.1:{own}"
            report(*asyncio.run(measure(given, service, url, Path(folder))))
        finally:
            for child in (service, endpoint):
                child.terminate()
                child.wait(30)


def free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as two:
        for free in (one, two):
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in (one, two)]


if __name__ == "__main__":
    main()
