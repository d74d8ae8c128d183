"""Is anything lost by kill -9, by a full disk, or by a task that is cancelled?

    python .bench/crash.py [--trials 500] [--seed 17]     # kills and a full disk
    python .bench/crash.py --sweep                        # every step, in a minute

A trial is a process that is killed 0 to 300 ms after its first work, and a second one
that opens the folder again. Five trials share a folder. A turn counts when save() has
returned, a memory of Mem0 when add() has. If the disk is full (RLIMIT_FSIZE), the
process first goes on as long, but no file grows beyond 4 KB.

`--sweep` lets a process die before each step on the disk: each event of Python's audit
that changes a file (open for writing, rename, remove, mkdir, rmdir, utime), and fsync.
It also cancels a task at each await. It exits with 1 if anything is lost or doubled.
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
import types
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
    """Run a coroutine function in a fork; return the rows that it told.

    Args:
        life: Seconds from its first row until it is killed. 0: it ends by itself.
        full: Before it is killed, let it go on as long with a full disk.
    """
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(60)  # if it hangs
            os.dup2(write, 1)
            asyncio.run(work(*arguments))
            os._exit(0)
        except Exception:  # noqa: BLE001  (the parent sees the exit code)
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as output:
        told = output.readline()
        if full:
            time.sleep(life)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))
        if life:
            time.sleep(life)
            os.kill(pid, signal.SIGKILL)
        told += output.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ended not in (0, DIED, -signal.SIGKILL):
        raise RuntimeError(f"{work.__name__} ended with {ended}")
    told += b'["died"]' * (ended == DIED)
    return [json.loads(line) for line in told.splitlines()]


def tell(*row: Any) -> None:
    os.write(1, json.dumps(row).encode() + b"\n")


@asynccontextmanager
async def opened(folder: Path, complete: Any = common.complete) -> AsyncIterator[Any]:
    """Yield a memory that does often what it does seldom."""
    delays = {"learn_delay": 0.005, "retry_delay": 0.01, "quiet": 0.02}
    more = {"settings": memory.Settings(history_turns=2, **delays)}
    # Learning sees all facts.
    more["limits"] = lambda: memory.Limits(1 << 18, "scripted")
    async with memory.Memory(folder, complete, common.embed, **more) as memories:
        yield memories


async def say(memories: memory.Memory, user: str, session: str, query: str) -> None:
    async with memories.turn(user, session) as turn:
        await turn.hints(query)
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


async def check(folder: Path, told: list[Any]) -> None:
    """Learn what waits, then compare what is there with what was acknowledged."""
    async with opened(folder) as memories:
        await memories.idle()
        facts = {user: await memories.facts(user) for user, _ in PLACES}
    found = Counter(unreadable=len(list(folder.rglob("*.corrupt-*"))))
    said: dict[str, list[str]] = {user: [] for user in facts}
    for user, session in PLACES:
        there = queries(folder, user, session, found)
        said[user] += there
        acknowledged = [row[3] for row in told if row[1:3] == [user, session]]
        found["lost"] += len(set(acknowledged) - set(there))
        found["doubled"] += len(there) - len(set(there))
        in_order = [query for query in there if query in set(acknowledged)]
        found["out of order"] += in_order != acknowledged
    for user, rows in facts.items():
        texts, expected = {row["text"] for row in rows}, facts_after(said[user])
        found["facts lost"] += len(expected - texts)
        found["facts back"] += len(texts - expected)
        found["facts doubled"] += sum(row["frequency"] for row in rows) - len(texts)
    tell("found", found, told)


def queries(folder: Path, user: str, session: str, found: Counter[str]) -> list[str]:
    """Return what a session's file holds, and count a wrong numbering."""
    path = folder / user / f"{session}.json"
    content = json.loads(path.read_bytes()) if path.exists() else {}
    rows = list(content.get("turns", {}).values())
    numbers = [row["turn"] for row in rows]
    found["out of order"] += numbers != [*range(1, len(rows) + 1)]
    return [row["query"] for row in rows]


def facts_after(said: Iterable[str]) -> set[str]:
    facts: set[str] = set()
    for query in said:
        for _, ended, text in common.changes(query):
            facts = facts - {f"{ended}."} | ({text} if text else set())
    return facts


async def mem0_live(folder: Path, life: str, seed: int) -> None:
    mem0 = common.mem0_as_documented(folder, os.environ["MODEL_URL"])
    for n in itertools.count():
        with suppress(Exception):  # whatever Mem0 raises when the disk is full
            added = await mem0.add(f"I like w{life}n{n}q", user_id="ann")
            tell("done", added["results"][0]["id"])


async def mem0_check(folder: Path, told: list[Any]) -> None:
    """Compare Mem0's store with the calls of add() that returned."""
    from mem0.vector_stores.faiss import FAISS

    found = Counter(unreadable=1)
    with suppress(ValueError):
        json.loads((folder / "faiss/memories.json").read_bytes())
        found["unreadable"] = 0
    stored = FAISS("memories", str(folder / "faiss")).docstore
    texts = {row["data"] for row in stored.values()}
    found["lost"] = len({row[1] for row in told} - stored.keys())
    found["doubled"] = len(stored) - len(texts)
    tell("found", found, [("done", id) for id in stored])


# --- Kills and a full disk ---


def measure(trials: int, seed: int, root: Path) -> None:
    systems, columns = {"": (live, check), "Mem0 ": (mem0_live, mem0_check)}, {}
    with closing(common.model(root, "--learning=0.001", "--embedding=0.001")) as model:
        os.environ["MODEL_URL"] = model.url
        for name, system in systems.items():
            for full, number in ((False, trials), (True, max(1, trials // 5))):
                title = name + ("disk full" if full else "killed")
                columns[title] = run_trials(number, seed, root, system, full)
    names = columns["killed"]
    rows = [[name, *(found[name] for found in columns.values())] for name in names]
    common.print_table(["", *columns], rows)


def run_trials(trials: int, seed: int, root: Path, system: Any, full: bool) -> Any:
    work, verify = system
    total, random, fault, told = Counter(trials=trials), Random(seed), False, []
    began = time.monotonic()
    for n in range(trials):
        if n % 5 == 0 or fault:
            folder, told = Path(tempfile.mkdtemp(dir=root)), []
        life, number = random.uniform(0.001, 0.3), random.randrange(1 << 30)
        new = run_process(work, folder, f"{n}l", number, life=life, full=full)
        [(_, found, told)] = run_process(verify, folder, told + new)
        fault = any(found.values())
        total.update(found | {"acknowledged": len(new), "trials with a fault": fault})
    total["seconds"] = round(time.monotonic() - began)
    return total


# --- The sweep: die at every step, be cancelled at every await ---

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime", "os.truncate"}
WORDS = [f"w{n}q" for n in range(12)]
ALL, TUESDAYS, NONE = set(WORDS), set(WORDS[1::2]), set[str]()
SAVES = ("save a turn", "begin damaged facts again")
DELETES = {  # words that are then said, words that are known, and what no file holds
    "delete_fact": (ALL, ALL - {"w0q"}, b"User likes w0q."),
    "delete_facts": (ALL, NONE, b"User likes"),
    "delete_session": (TUESDAYS, ALL, f"Noted in {MONDAY}".encode()),
    "delete_user": (NONE, NONE, b"w0q"),
}
SWEEPS = (*SAVES, "learn, fold, embed", *DELETES)


async def prepare(folder: Path, name: str) -> None:
    learns = name != "learn, fold, embed"
    complete = common.complete if learns else lambda *_: asyncio.Future()
    async with opened(folder, complete) as memories:
        for n, word in enumerate(WORDS):
            await say(memories, "ann", (MONDAY, TUESDAY)[n % 2], f"I like {word}")
        if learns:
            await memories.idle()
    if name == "begin damaged facts again":
        (folder / "ann/memory.json").write_bytes(b'{"facts":')


async def act(memories: memory.Memory, name: str) -> None:
    if name in SAVES:
        async with memories.turn("ann", MONDAY) as turn:
            await turn.hints("I like newq")
            await turn.search_conversations("w1q")
            await turn.save("I like newq", "Noted.")
    elif name in DELETES:
        ids = {fact["text"]: fact["id"] for fact in await memories.facts("ann")}
        of = {"delete_session": [MONDAY], "delete_fact": [ids.get("User likes w0q.")]}
        await getattr(memories.user("ann"), name)(*of.get(name, []))
    else:
        await memories.idle()


def die_at(step: int) -> None:
    """Let this process die before its nth step on the disk."""
    steps, fsync = itertools.count(1), os.fsync

    def count(event: str, arguments: Any) -> None:
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in CHANGES) and next(steps) == step:
            os._exit(DIED)

    sys.addaudithook(count)
    # Nothing audits it, so it is counted as a rename.
    os.fsync = lambda file: (count("os.rename", ()), fsync(file))


@types.coroutine
def cancelled_at(step: int, coroutine: Any) -> Any:
    """Await a coroutine, and cancel the current task when it waits the nth time."""
    go_on, given = coroutine.send, None
    while True:
        try:
            waited_for = go_on(given)
        except StopIteration:
            return
        step -= 1
        if not step:
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        try:
            go_on, given = coroutine.send, (yield waited_for)
        except BaseException as error:  # noqa: BLE001  (it is thrown in again)
            go_on, given = coroutine.throw, error


async def act_until(folder: Path, name: str, step: int, cancel: bool) -> None:
    """Act, and die at a step on the disk, or be cancelled at an await."""

    async def run() -> None:
        await cancelled_at(step if cancel else 0, act(memories, name))
        tell("acted")

    if not cancel:
        die_at(step)
    async with opened(folder) as memories:
        await asyncio.wait([task := asyncio.create_task(run())])
        if not task.cancelled():
            task.result()
        async with memories.turn("ann", MONDAY) as turn:  # no lock is held
            await turn.save("I like lastq", "Noted.")
        await memories.idle()


async def go_on(folder: Path, name: str, acted: bool) -> None:
    """Open the folder again: nothing is lost, doubled or back; a delete is repeated."""
    async with opened(folder) as memories:
        await memories.idle()
        await say(memories, "ann", TUESDAY, "I like lastq")
        said, known = await read_words(folder, memories)
        if name not in DELETES:
            new = {"newq"} if name in SAVES and acted else NONE
            assert said == known and ALL | new <= said <= ALL | {"newq"}, (said, known)
            return
        *left, gone = DELETES[name]
        assert [said, known] in ([left] if acted else [left, [ALL, ALL]]), (said, known)
        with suppress(memory.NotFound):
            await act(memories, name)
        assert [*await read_words(folder, memories)] == left, name
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert not any(gone in path.read_bytes() for path in files), files


async def read_words(
    folder: Path, memories: memory.Memory
) -> tuple[set[str], set[str]]:
    """Return the words that were said, and those that are known, but the last one."""
    await memories.idle()
    found: Counter[str] = Counter()
    there = [queries(folder, "ann", session, found) for session in (MONDAY, TUESDAY)]
    said = [query.split()[-1] for query in itertools.chain(*there)]
    facts = await memories.facts("ann")
    known = [fact["text"].split()[-1].strip(".") for fact in facts]
    for words in (said, known):  # the last word is said several times
        words[:] = [word for word in words if word != "lastq"]
        assert len(words) == len(set(words)), words
    assert not found["out of order"], there
    assert sum(fact["frequency"] > 1 for fact in facts) <= 1, facts
    return set(said), set(known)


def sweep_one(root: Path, name: str, cancel: bool) -> tuple[int, list[str]]:
    """Return the number of steps or awaits, and the faults found there."""
    base, faults = Path(tempfile.mkdtemp(dir=root)), []
    run_process(prepare, base / "all", name)
    for step in itertools.count(1):
        folder = Path(shutil.copytree(base / "all", base / str(step)))
        told = []
        try:
            told = run_process(act_until, folder, name, step, cancel)
            run_process(go_on, folder, name, ["acted"] in told)
        except RuntimeError as error:
            faults.append(f"{name}, step {step}: {error}")
        if told == [["acted"]] or len(faults) > 1:
            return step - 1, faults


def sweep(root: Path) -> int:
    """Print what was found at each step and await; return the number of faults."""
    cases = [(name, cancel) for cancel in (False, True) for name in SWEEPS]
    cases.remove(("learn, fold, embed", True))
    fork, rows = multiprocessing.get_context("fork"), []
    with ProcessPoolExecutor(os.cpu_count(), fork) as pool:
        results = [pool.submit(sweep_one, root, *case) for case in cases]
        for (name, cancel), result in zip(cases, results, strict=True):
            steps, faults = result.result()
            rows.append([name, "await" if cancel else "step", steps, len(faults)])
            print(*faults, sep="\n", end="\n" * bool(faults))
    common.print_table(["while it does this", "at every", "of", "faults"], rows)
    return sum(row[-1] for row in rows)


def main() -> None:
    options = common.options(__doc__, trials=500, seed=17, sweep=False)
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": str(root / "mem0")}
        importlib.import_module("mem0")  # a second, so before the forks
        if options.sweep:
            sys.exit(1 if sweep(root) else 0)
        measure(options.trials, options.seed, root)


if __name__ == "__main__":
    main()
