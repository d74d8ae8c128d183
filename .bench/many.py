"""That two machines may serve one folder: services behind nginx, killed again and again.

    nice python .bench/many.py [--turns 30] [--kills 5] [--seed 1]
    nice bash .bench/many.sh gluster [the same]

Eight clients of four users share sessions and go on until each turn is acknowledged; a
service that is killed (every third one is asked to stop) starts again. Then everything
is looked for: each acknowledged turn once, as answered, and after the ones that were
acknowledged before it was asked; each fact once; and the same through either service, of
which one has just started. First nginx takes turns, then it hashes the user, as in the
README. It needs nginx; the model is test_main.py's stand-in (`stand-in HOST PORT`). The
services run where --hosts, --namespaces and --folders say: many.sh has two mounts.
"""

import argparse
import asyncio
import json
import os
import signal
import string
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import httpx
import uvicorn

ROOT = Path(__file__).resolve().parents[1]
USERS = ("ann", "bob", "Cleo Müller", "dan")
SESSIONS = {user: [str(uuid.uuid4()), str(uuid.uuid4())] for user in USERS}  # shared
CLIENTS = 8
TRIES = 60  # to send a message
LEARNING = 90.0  # seconds until all has to be learned
MODEL, SERVICES, FRONT = 18100, (18101, 18102), 18110  # ports


class Config(string.Template):
    delimiter = "@"


NGINX = Config("""
daemon off; pid @scratch/nginx.pid; worker_processes 1; events { worker_connections 256; }
http {
    access_log off; client_body_temp_path @scratch/n1; proxy_temp_path @scratch/n2;
    fastcgi_temp_path @scratch/n3; uwsgi_temp_path @scratch/n4; scgi_temp_path @scratch/n5;
    map $http_x_user_id $named { "" $request_id; default $http_x_user_id; }
    map $request_uri $user { "~^/users/(?<name>[^/?]+)" $name; default $named; }
    upstream chat {
        @hash
        server @first fail_timeout=2s; server @second fail_timeout=2s;
        keepalive 16; keepalive_timeout 4s;
    }
    server {
        listen @front; proxy_http_version 1.1; proxy_set_header Connection "";
        proxy_connect_timeout 2s;
        location / { proxy_pass http://chat; }
    }
}
""")


@dataclass
class Said:
    """A message that was sent once."""

    user: str
    session: str
    text: str  # no other has the same
    fact: str
    sent: float  # monotonic seconds
    ended: float = 0.0
    end: str = "cut"
    turn: int = 0
    response: str = ""


# --- The processes ---


def stand_in(host: str, port: int) -> None:
    sys.path.append(str(ROOT))
    import test_main

    model = test_main.StandIn()
    model.pause = 0.02  # seconds between tokens
    uvicorn.run(model, host=host, port=port, log_level="warning", lifespan="off")


class Setup:
    """A model, two services and nginx before them."""

    def __init__(self, options: argparse.Namespace, scratch: str, hashed: bool):
        self.options, self.scratch = options, Path(scratch)
        self.running: dict[Any, subprocess.Popen[bytes]] = {}
        self.front = f"{options.front}:{FRONT}"
        ports = zip(options.hosts, SERVICES, strict=True)
        self.services = [f"{host}:{port}" for host, port in ports]
        self.hash = "hash $user consistent;" if hashed else ""
        name = "hashed" if hashed else "turns"
        self.folders = [Path(f or scratch, name) for f in options.folders]

    def start(self) -> None:
        self.folders[0].mkdir(parents=True)
        host, scratch = self.options.front, str(self.scratch)
        python = [sys.executable, __file__, "stand-in", host, str(MODEL)]
        self.launch("model", python, DATA_DIR=str(self.scratch / "unused"))
        first, second = self.services
        values = {"scratch": scratch, "front": self.front, "hash": self.hash}
        config = self.scratch / "nginx.conf"
        config.write_text(NGINX.substitute(values, first=first, second=second))
        self.launch(
            "nginx", ["nginx", "-e", "stderr", "-p", scratch, "-c", str(config)]
        )
        self.serve(0)
        self.serve(1)

    def launch(self, name: Any, command: list[str], **environment: str) -> None:
        known = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        with open(self.scratch / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                command, cwd=ROOT, env=known | environment, stdout=log, stderr=log
            )

    def serve(self, n: int) -> None:
        url = f"http://{self.options.front}:{MODEL}/v1"
        known = {"OPENAI_BASE_URL": url, "EMBEDDING_BASE_URL": url}
        known |= {"OPENAI_API_KEY": "EMPTY"}
        host, port = self.services[n].split(":")
        command = [sys.executable, "-m", "uvicorn", "main:app"]
        command += ["--host", host, "--port", port, "--no-access-log"]
        command += ["--timeout-graceful-shutdown", "3"]
        if namespace := self.options.namespaces[n]:
            command = ["nsenter", f"--net=/run/netns/{namespace}", *command]
        self.launch(n, command, DATA_DIR=str(self.folders[n]), **known)

    async def ready(self, name: Any, url: str) -> None:
        async with httpx.AsyncClient(timeout=5) as http:
            for _ in range(600):
                try:
                    if (await http.get(f"http://{url}")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                if self.running[name].poll() is not None:
                    break
                await asyncio.sleep(0.1)
        log = await asyncio.to_thread((self.scratch / f"{name}.log").read_text)
        raise RuntimeError(f"{name} does not start: {log[-2000:]}")

    async def restart(self, n: int, by: int, pause: float = 0.0) -> None:
        self.running[n].send_signal(by)
        await asyncio.to_thread(self.running[n].wait)
        await asyncio.sleep(pause)
        await asyncio.to_thread(self.serve, n)
        await self.ready(n, f"{self.services[n]}/health")

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# --- The load ---


async def talk(setup: Setup, n: int, said: list[Said]) -> None:
    random, user = Random(setup.options.seed * 100 + n), USERS[n % len(USERS)]
    sessions = [*SESSIONS[user] * 2, str(uuid.uuid4())]
    base, header = f"http://{setup.front}", {"X-User-Id": quote(user)}
    async with httpx.AsyncClient(base_url=base, timeout=40, headers=header) as http:
        for k in range(setup.options.turns):
            session, word = random.choice(sessions), f"w{n}x{k}"
            text, fact = f"I like {word}", f"User likes {word}."
            if k % 5 == 4:
                text = f"I use {word} as productivity tools"
                fact = f"User uses {word} as a productivity tool."
            for _ in range(TRIES):
                once = f"[{uuid.uuid4().hex[:10]}] {text}"
                row = Said(user, session, once, fact, time.monotonic())
                said.append(row)
                await say(http, row)
                if row.end == "done":
                    break
                await asyncio.sleep(0.3)
            else:
                raise RuntimeError(f"no answer: {row}")
            await asyncio.sleep(random.uniform(0, 0.6))


async def say(http: httpx.AsyncClient, row: Said) -> None:
    body = {"user_id": row.user, "session_id": row.session, "message": row.text}
    try:
        async with http.stream("POST", "/chat", json=body) as answer:
            if answer.status_code != 200:
                row.end = f"HTTP {answer.status_code}"
                return
            async for line in answer.aiter_lines():
                event = json.loads(line)
                if event["type"] == "done":
                    row.end, row.ended = "done", time.monotonic()
                    row.turn, row.response = event["turn"], event["response"]
                elif event["type"] == "error":
                    row.end = f"error {event['code']}"
    except httpx.HTTPError as error:
        row.end = "done" if row.end == "done" else type(error).__name__


async def kill(setup: Setup, said: list[Said]) -> None:
    random, kills = Random(setup.options.seed), setup.options.kills
    for k in range(kills):
        share = CLIENTS * setup.options.turns * (k + 1) / (kills + 1)
        while sum(row.end == "done" for row in said) < share:
            await asyncio.sleep(0.02)
        await asyncio.sleep(random.uniform(0, 0.5))
        by = signal.SIGTERM if k % 3 == 2 else signal.SIGKILL
        await setup.restart(k % 2, by, random.uniform(0.5, 1.5))


# --- What stands then ---


async def look(service: str) -> tuple[dict[str, list[Any]], dict[str, list[str]]]:
    """Return the turns by session, and the facts by user."""
    turns, facts = {}, {}
    async with httpx.AsyncClient(base_url=f"http://{service}", timeout=40) as http:

        async def get(path: str) -> Any:
            return (await http.get(path)).raise_for_status().json()

        for user in USERS:
            for session in (await get(f"/users/{user}/sessions"))["sessions"]:
                key = session["session_id"]
                turns[key] = (await get(f"/users/{user}/sessions/{key}"))["turns"]
            found = (await get(f"/users/{user}/memories"))["memories"]
            facts[user] = sorted(fact["text"] for fact in found)
    return turns, facts


def count(said: list[Said], turns: dict, facts: dict) -> Counter[str]:
    places: dict[str, list[tuple[str, Any]]] = {row.text: [] for row in said}
    counts: Counter[str] = Counter()
    for session, found in turns.items():
        numbers = [turn["turn"] for turn in found]
        counts["out of order"] += numbers != list(range(1, len(numbers) + 1))
        for turn in found:
            places.setdefault(turn["query"], []).append((session, turn))
    counts["doubled"] = sum(len(place) > 1 for place in places.values())
    counts["never said"] = len(places) - len(said)
    acknowledged = [row for row in said if row.end == "done"]
    for row in acknowledged:
        counts["lost"] += not places[row.text]
        for session, turn in places[row.text]:
            known = (row.session, row.turn, row.response, "complete")
            found = (session, turn["turn"], turn["response"], turn["status"])
            counts["altered"] += known != found
    for row in said:
        number = min((turn["turn"] for _, turn in places[row.text]), default=None)
        if number is not None:
            earlier = (a for a in acknowledged if a.session == row.session)
            counts["out of order"] += any(
                a.ended < row.sent and a.turn >= number for a in earlier
            )
    for user, have in facts.items():
        want = {row.fact for row in said if row.user == user and places[row.text]}
        counts["facts missing"] += len(want - set(have))
        counts["facts doubled"] += len(have) - len(set(have))
        counts["facts never said"] += len(set(have) - want)
    return counts


async def check(setup: Setup, said: list[Said]) -> Counter[str]:
    """Return the faults."""
    await setup.restart(0, signal.SIGKILL)
    until = time.monotonic() + LEARNING
    while time.monotonic() < until:
        if not count(said, *await look(setup.services[0]))["facts missing"]:
            break
        await asyncio.sleep(0.5)
    await asyncio.sleep(3)  # for what would be learned twice
    cold, warm = [await look(service) for service in setup.services]
    faults = count(said, *cold)
    faults["services differ"] = cold != warm
    found = await asyncio.to_thread(setup.folders[0].rglob, "*.corrupt-*")
    faults["damaged files"] = len(list(found))
    # The one that has just started answers from memory, and the other one sees it.
    [session, _], text = SESSIONS["ann"], "What are the productivity tools that I use?"
    last = Said("ann", session, text, "", time.monotonic())
    url = f"http://{setup.services[0]}"
    async with httpx.AsyncClient(base_url=url, timeout=40) as http:
        await say(http, last)
    turns, _ = await look(setup.services[1])
    seen = last.end == "done" and turns[session][-1]["response"] == last.response
    faults["forgets"] = not seen or "I remember: " not in last.response
    return faults


async def measure(setup: Setup) -> Counter[str]:
    await setup.ready("model", f"{setup.options.front}:{MODEL}/v1/models")
    for n, service in enumerate(setup.services):
        await setup.ready(n, f"{service}/health")
    await setup.ready("nginx", f"{setup.front}/health")
    said: list[Said] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(kill(setup, said))
        for n in range(CLIENTS):
            group.create_task(talk(setup, n, said))
    faults = await check(setup, said)
    ends = Counter(row.end for row in said)
    times = sorted(row.ended - row.sent for row in said if row.end == "done")
    done, middle = ends.pop("done"), times[len(times) // 2]
    print(f"{done} acknowledged, median {middle:.2f} s; other ends: {dict(ends)}")
    print(", ".join(f"{int(n)} {fault}" for fault, n in faults.items()), flush=True)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("turns", 30), ("kills", 5), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--front", default="127.0.0.1", help="address of nginx")
    parser.add_argument("--hosts", nargs=2, default=["127.0.0.1"] * 2)
    parser.add_argument("--namespaces", nargs=2, default=["", ""])
    parser.add_argument(
        "--folders", nargs=2, default=["", ""], help="one, mounted twice"
    )
    options = parser.parse_args()
    faults: Counter[str] = Counter()
    for hashed in (False, True):
        print(
            "\nnginx hashes the user" if hashed else "\nnginx takes turns", flush=True
        )
        with tempfile.TemporaryDirectory() as scratch:
            setup = Setup(options, scratch, hashed)
            try:
                setup.start()
                faults += asyncio.run(measure(setup))
            finally:
                setup.stop()
    sys.exit("FAULTS" if faults.total() else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["stand-in"]:
        stand_in(sys.argv[2], int(sys.argv[3]))
    else:
        main()
