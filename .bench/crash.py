"""Is anything lost by kill -9, by a full disk, or by a task that is cancelled?

    python .bench/crash.py [--trials 500] [--seed 17]     # kills and a full disk
    python .bench/crash.py --sweep                        # every step, half a minute

A trial is a process that is killed 0 to 300 ms after its first work, and a second one
that opens the folder again. Five trials share a folder. A turn counts when save() has
returned, a memory of Mem0 when add() has. If the disk is full (RLIMIT_FSIZE), the
process first goes on as long, but no file grows beyond 4 KB.

`--sweep` lets a process die, or cancels its task, at each step on the disk: each event
of Python's audit that changes a file (open for writing, rename, remove, mkdir, rmdir),
and fsync. Who dies before an fsync loses what the file holds.
"""

import asyncio
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import common

import memory

MONDAY, TUESDAY = (str(uuid.UUID(int=n)) for n in (1, 2))
PLACES = [(user, session) for user in ("ann", "bob") for session in (MONDAY, TUESDAY)]
DIED = 70  # the exit code of a process that died at a step


def run_process(work: Any, *arguments: Any, life: float = 0, full: bool = False) -> Any:
    """Run a coroutine function in a fork; return the rows that it told and returns.

    It is killed `life` seconds after its first row; 0: it ends by itself. If `full`, it
    first goes on as long, until the disk is full.
    """
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(60)  # if it hangs
            os.dup2(write, 1)
            tell(*(asyncio.run(work(*arguments)) or ["ended"]))
            os._exit(0)
        except Exception:  # noqa: BLE001  (the parent sees the exit code)
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as output:
        told = [output.readline()]
        if full:
            time.sleep(life)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))
        if life:
            time.sleep(life)
            os.kill(pid, signal.SIGKILL)
        told += output.readlines()
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ended not in (0, DIED, -signal.SIGKILL):
        raise RuntimeError(f"{work.__name__} ended with {ended}")
    return [json.loads(line) for line in told if line]


def tell(*row: Any) -> None:
    os.write(1, json.dumps(row).encode() + b"\n")


@asynccontextmanager
async def opened(folder: Path, complete: Any = common.complete) -> AsyncIterator[Any]:
    """Yield a memory that does often what it does seldom."""
    delays = {"learn_delay": 0.005, "retry_delay": 0.01}
    # Facts that do not fit `hint_tokens` get vectors, and a large context shows all.
    settings = memory.Settings(history_turns=2, hint_tokens=20, **delays)
    more = {"settings": settings, "limits": lambda: memory.Limits(1 << 18, "scripted")}
    async with memory.Memory(folder, complete, common.embed, **more) as memories:
        yield memories


async def say(memories: memory.Memory, user: str, session: str, query: str) -> None:
    async with memories.turn(user, session) as turn:
        await turn.hints(query)
        await turn.search_conversations(query)
        await turn.save(query, f"Noted in {session}.")
    tell("done", user, session, query)


async def live(folder: Path, life: str, seed: int) -> None:
    async def talk(n: int, user: str, session: str) -> None:
        random, liked = Random(f"{seed}/{n}"), []
        for turn in itertools.count():
            word, chance = f"w{life}s{n}n{turn}q", random.random()
            query = f"I like {word}"
            if liked and chance < 0.4:
                old = liked.pop(random.randrange(len(liked)))
                query += f" instead of {old}"
            if liked and chance < 0.2:
                query = f"I do not like {old} anymore"
            else:
                liked.append(word)
            with suppress(OSError):  # of a full disk
                await say(memories, user, session, query)

    async with opened(folder) as memories:
        await asyncio.gather(*(talk(n, *place) for n, place in enumerate(PLACES)))


async def check(folder: Path, told: list[Any]) -> Any:
    """Return the faults of what is there, and what was acknowledged."""
    there, facts, found = await read(folder)
    found["unreadable"] = len(list(folder.rglob("*.corrupt-*")))
    for place, queries in there.items():
        acknowledged = [row[3] for row in told if row[1:3] == [*place]]
        found["lost"] += len(set(acknowledged) - set(queries))
        in_order = [query for query in queries if query in set(acknowledged)]
        found["out of order"] += in_order != acknowledged
    for user, rows in facts.items():
        said = [query for place in there if place[0] == user for query in there[place]]
        texts, expected = {row["text"] for row in rows}, facts_after(said)
        found["facts lost"] += len(expected - texts)
        found["facts back"] += len(texts - expected)
        found["facts doubled"] += sum(row["frequency"] for row in rows) - len(texts)
    return found, told


async def read(folder: Path) -> tuple[dict[Any, list[str]], dict[str, Any], Any]:
    """Learn what waits; return what was said by place, facts by user, and faults."""
    async with opened(folder) as memories:
        await memories.idle()
        facts = {user: await memories.facts(user) for user, _ in PLACES}
    found, there = Counter[str](), {}
    for user, session in PLACES:
        path = folder / user / f"{session}.json"
        content = json.loads(path.read_bytes()) if path.exists() else {}
        rows = list(content.get("turns", {}).values())
        numbers = [row["turn"] for row in rows]
        found["out of order"] += numbers != [*range(1, len(rows) + 1)]
        there[user, session] = queries = [row["query"] for row in rows]
        found["doubled"] += len(queries) - len(set(queries))
    return there, facts, found


def facts_after(said: Iterable[str]) -> set[str]:
    facts: set[str] = set()
    for _, ended, text in itertools.chain(*map(common.changes, said)):
        facts = facts - {f"{ended}."} | ({text} if text else set())
    return facts


async def mem0_live(folder: Path, life: str, seed: int) -> None:
    mem0 = common.mem0_as_documented(folder, os.environ["MODEL_URL"])
    for n in itertools.count():
        with suppress(Exception):  # whatever Mem0 raises when the disk is full
            added = await mem0.add(f"I like w{life}n{n}q", user_id="ann")
            tell("done", added["results"][0]["id"])


async def mem0_check(folder: Path, told: list[Any]) -> Any:
    """Compare Mem0's store with the calls of add() that returned."""
    from mem0.vector_stores.faiss import FAISS

    stored = FAISS("memories", str(folder / "faiss")).docstore
    texts = {row["data"] for row in stored.values()}
    lost, doubled = {row[1] for row in told} - stored.keys(), len(stored) - len(texts)
    found = Counter(lost=len(lost), doubled=doubled)
    return found, [("done", id) for id in stored]


# --- Kills and a full disk ---


def measure(trials: int, seed: int, root: Path) -> None:
    systems, columns = {"": (live, check), "Mem0 ": (mem0_live, mem0_check)}, {}
    with closing(common.model(root, "--learning=0.001", "--embedding=0.001")) as model:
        os.environ["MODEL_URL"] = model.url
        for name, full in itertools.product(systems, (False, True)):
            title = name + ("disk full" if full else "killed")
            number = max(1, trials // 5) if full else trials
            columns[title] = run_trials(number, seed, root, full, *systems[name])
    rows = [[n, *(found[n] for found in columns.values())] for n in columns["killed"]]
    common.print_table(["", *columns], rows)


def run_trials(trials: int, seed: int, root: Path, full: bool, work: Any, verify: Any):
    total, random, fault, told = Counter(trials=trials), Random(seed), False, []
    for n in range(trials):
        if n % 5 == 0 or fault:
            folder, told = Path(tempfile.mkdtemp(dir=root)), []
        life, number = random.uniform(0.001, 0.3), random.randrange(1 << 30)
        new = run_process(work, folder, f"{n}l", number, life=life, full=full)
        [(found, told)] = run_process(verify, folder, told + new)
        fault = any(found.values())
        total.update(found | {"acknowledged": len(new), "trials with a fault": fault})
    return total


# --- The sweep: die or be cancelled at every step ---

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.fsync"}
WORDS = [f"w{n}q" for n in range(12)]
ALL, TUESDAYS, NONE = set(WORDS), set(WORDS[1::2]), set[str]()
DAMAGED = "begin damaged facts again"
SAVES = ("save a turn", DAMAGED)
DELETES = {  # words that are then said, words that are known, and what no file holds
    "delete_fact": (ALL, ALL - {"w0q"}, b"User likes w0q."),
    "delete_facts": (ALL, NONE, b"User likes"),
    "delete_session": (TUESDAYS, ALL, f"Noted in {MONDAY}".encode()),
    "delete_user": (NONE, NONE, b"w0q"),
}
SWEEPS = ("learn, fold, embed", *SAVES, *DELETES)  # nobody waits for the first


async def prepare(folder: Path, name: str) -> None:
    learns = name != "learn, fold, embed"
    complete = common.complete if learns else lambda *_: asyncio.Future()
    async with opened(folder, complete) as memories:
        for n, word in enumerate(WORDS):
            await say(memories, "ann", (MONDAY, TUESDAY)[n % 2], f"I like {word}")
        if learns:
            await memories.idle()
    if name == DAMAGED:
        (folder / "ann/memory.json").write_bytes(b'{"facts":')
    for path in [*folder.glob("ann/*.json")] * (name in DELETES):
        shutil.copy(path, f"{path}.corrupt-1")  # a delete removes it, too


async def act(memories: memory.Memory, name: str) -> None:
    if name in SAVES:
        await say(memories, "ann", MONDAY, "I like newq")
    elif name in DELETES:
        ids = {fact["text"]: fact["id"] for fact in await memories.facts("ann")}
        of = {"delete_session": [MONDAY], "delete_fact": [ids.get("User likes w0q.")]}
        await getattr(memories.user("ann"), name)(*of.get(name, []))
    else:
        await memories.idle()


def stop_at(step: int, cancel: Any) -> None:
    """Die before the nth step on the disk from now on, or cancel a task there."""
    steps, fsync = itertools.count(1), os.fsync

    def count(event: str, arguments: Any) -> None:
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in CHANGES) or next(steps) != step:
            return
        if cancel:
            cancel()
            time.sleep(0.02)  # the thread that writes is slower than the next turn
            return
        if event == "os.fsync":
            with suppress(OSError):  # of a folder
                os.truncate(*arguments, 0)  # what is not synced may be lost
        os._exit(DIED)

    sys.addaudithook(count)
    os.fsync = lambda file: (count("os.fsync", [file]), fsync(file))  # not audited


async def act_until(folder: Path, name: str, step: int, cancels: bool) -> None:
    """Act, and die or be cancelled at a step on the disk."""
    if not cancels:
        stop_at(step, None)
    async with opened(folder) as memories:
        task = asyncio.create_task(act(memories, name))
        if cancels:
            call = asyncio.get_running_loop().call_soon_threadsafe
            stop_at(step, lambda: call(task.cancel))
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()  # if it failed, so does this process
            tell("acted")
        await say(memories, "ann", MONDAY, "I like thisq")  # no lock is held
        await memories.idle()


async def judge(folder: Path, name: str, told: list[Any]) -> None:
    """Nothing is lost or doubled. A delete is done or not, and done when repeated."""
    async with opened(folder) as memories:  # which is closed before it has learned
        await say(memories, "ann", TUESDAY, "I like thatq")
    told.append(["done", "ann", TUESDAY, "I like thatq"])
    if name not in DELETES:
        found, _ = await check(folder, told)
        found["unreadable"] -= name == DAMAGED
        assert not any(found.values()), found
        return
    *left, gone = DELETES[name]
    words = await words_left(folder)
    assert words in ([left] if ["acted"] in told else [left, [ALL, ALL]]), words
    async with opened(folder) as memories:
        with suppress(memory.NotFound):
            await act(memories, name)
    assert await words_left(folder) == left, name
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not any(gone in path.read_bytes() for path in files), files


async def words_left(folder: Path) -> list[set[str]]:
    """Return which of the words were said, and which are known."""
    there, facts, found = await read(folder)
    assert not any(found.values()), found
    texts = [*itertools.chain(*there.values())], [fact["text"] for fact in facts["ann"]]
    return [{text.split()[-1].strip(".") for text in some} & ALL for some in texts]


def sweep_one(root: Path, name: str, cancels: bool) -> tuple[int, list[str]]:
    """Return the number of steps, and the faults found there."""
    base, faults = Path(tempfile.mkdtemp(dir=root)), []
    said = run_process(prepare, base / "all", name)
    for step in itertools.count(1):
        folder = Path(shutil.copytree(base / "all", base / str(step)))
        told = []
        try:
            told = run_process(act_until, folder, name, step, cancels)
            run_process(judge, folder, name, said + told)
        except RuntimeError as error:
            faults.append(f"{name}, step {step}: {error}")
        if ["acted"] in told and ["ended"] in told or len(faults) > 1:
            return step - 1, faults


def sweep(root: Path) -> int:
    """Print what was found at each step; return the number of faults."""
    cases = [(name, cancels) for cancels in (False, True) for name in SWEEPS[cancels:]]
    fork, rows = multiprocessing.get_context("fork"), []
    with ProcessPoolExecutor(os.cpu_count(), fork) as pool:
        results = [pool.submit(sweep_one, root, *case) for case in cases]
        for (name, cancels), result in zip(cases, results, strict=True):
            steps, faults = result.result()
            rows.append([name, "cancelled" if cancels else "dies", steps, len(faults)])
            print(*faults, sep="\n", end="\n" * bool(faults))
    common.print_table(["while it does this", "it", "at steps", "faults"], rows)
    return sum(row[-1] for row in rows)


def main() -> None:
    options = common.options(__doc__, trials=500, seed=17, sweep=False)
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": str(root / "mem0")}
        importlib.import_module("mem0")  # a second, so before the forks
        if options.sweep:
            sys.exit(sweep(root) > 0)
        measure(options.trials, options.seed, root)


if __name__ == "__main__":
    main()
