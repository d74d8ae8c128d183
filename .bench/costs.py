"""What memory costs: a fact search by the number of facts, a turn by the number before it.

    nice python .bench/costs.py

CPU is time.process_time (all threads), as the median of many; vectors are random, of
1536 dimensions. Another copy of memory.py: PYTHONPATH=that/folder.
"""

import asyncio
import hashlib
import json
import logging
import sys
import tempfile
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

import memory

scratch = tempfile.TemporaryDirectory()
DIMENSION = 1536
FACTS = (20, 200, 2000)
TURNS = (10, 100, 1000, 5000)
REPEATS = 50  # searches
FACT = (
    "{who} bought {a} {thing} in {Place}|{who} works with {Name} on {thing} reports"
    "|{who} has a {thing} called {Name}|{who} plans to visit {Name} in {Place} in {month}"
    "|{who} is allergic to {thing}|{who} learned {thing} from {Name}, a friend of {Other}"
    "|{who} moved from {Place} to {Other} in {month} {year}|{who} prefers {thing} to {a}"
)
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August"]


def sentence(random: Random, who: str) -> str:
    """Return a sentence of common words and made-up ones, few of them frequent."""

    def word() -> str:
        kind = Random(int(20 * random.paretovariate(0.7)) % 3000)
        return "".join(
            kind.choice("bdfgklmnprst") + kind.choice("aeiou") for _ in "123"
        )

    names = {name.lower(): word() for name in ("Name", "Place", "Other", "thing", "a")}
    names |= {name.title(): word.title() for name, word in names.items()}
    names |= {"month": random.choice(MONTHS), "year": str(random.randrange(1990, 2026))}
    return random.choice(FACT.split("|")).format(who=who, **names)


async def embed(texts: list[str]) -> list[np.ndarray]:
    def vector(text: str) -> np.ndarray:
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        return np.random.default_rng(seed).standard_normal(DIMENSION, "float32")

    return [vector(text) for text in texts]


async def complete(messages: Any, schema: Any) -> str:
    return json.dumps({"operations": [], "summary": "They spoke of many things. " * 20})


async def learned(service: memory.Memory) -> None:
    learner = service.learner
    while learner.pending or any(due.is_set() for due in learner.due.values()):
        await asyncio.sleep(0.002)


async def know(service: memory.Memory, name: str, count: int) -> str:
    """Give a user so many facts, and their vectors."""
    random = Random(count)
    facts: dict[str, memory.Fact] = {}
    async with service.turn(name, str(uuid.uuid4())):
        pass
    for n in range(count):
        at = (datetime.now(UTC) - timedelta(hours=n)).isoformat()
        fact = {"id": str(uuid.uuid4()), "text": sentence(random, "User")}
        fact |= {"kind": "episodic", "importance": random.random(), "frequency": 1}
        fact |= {"created_at": at, "last_seen_at": at, "source": "-/1"}
        facts[fact["id"]] = fact
    await learned(service)
    await service.change(name, lambda store, _: store.state.facts.update(facts))
    while await service.learner.embed_missing(name, memory.FACTS):
        pass
    return name


async def measure_facts(service: memory.Memory) -> None:
    print("\nms of CPU, k = 8; 'matching all': the query holds a word of every fact")
    names = ("search", "matching all", "after a change", "a turn's hints()")
    print(f"{'facts':>8}", *(f"{name:>16}" for name in names))
    for count in FACTS:
        user = await know(service, f"{count}-facts", count)
        costs = [
            await search_cost(service, user, "Do I know who"),
            await search_cost(service, user, "Which user"),
            await search_cost(service, user, "Do I know who", change=True),
            await hints_cost(service, user),
        ]
        print(f"{count:8}", *(f"{cost:16.2f}" for cost in costs))
        await learned(service)


async def search_cost(
    service: memory.Memory, user: str, start: str, change: bool = False
) -> float:
    random, spent = Random(1), []
    for _ in range(REPEATS):
        query = sentence(random, start)
        [vector] = await embed([query])
        vector /= np.linalg.norm(vector)
        if change:  # what a new fact makes anew, less its embedding
            service.cache.forget(service.folder / user)
        begun = time.process_time()
        await service.run(user, memory.IndexedFiles.search_facts, query, vector, 8)
        spent.append(1000 * (time.process_time() - begun))
    return median(spent)


async def hints_cost(service: memory.Memory, user: str) -> float:
    random, spent = Random(1), []
    async with service.turn(user, str(uuid.uuid4())) as turn:
        for _ in range(REPEATS):
            query = sentence(random, "Do I know who")
            await service.embedder.vectors([query])  # the endpoint's work
            begun = time.process_time()
            await turn.hints(query)
            spent.append(1000 * (time.process_time() - begun))
    return median(spent)


async def measure_turns(service: memory.Memory) -> None:
    # A turn rewrites the transcript's newest file: over so many turns, each size of it
    # counts alike. The sessions take turns, so that a busy machine slows all of them alike.
    spent: dict[int, list[tuple[float, ...]]] = {count: [] for count in TURNS}
    for count in TURNS:
        for n in range(count):
            await take_turn(service, f"{count}-turns")
            if not n % memory.BATCH_TURNS:
                await learned(service)
        await learned(service)
    for _ in range(memory.FILE_TURNS):
        for count in TURNS:
            wall, cpu = time.perf_counter(), time.process_time()
            await take_turn(service, f"{count}-turns")
            ended, turn = time.perf_counter(), time.process_time()
            await learned(service)
            learning = time.process_time() - turn
            spent[count].append((turn - cpu, ended - wall, learning))

    print(
        f"\nms, median of {memory.FILE_TURNS} turns: begin, hints, save; then the rest"
    )
    names = ("CPU", "wall", "learning, CPU", "past search, CPU", "the first")
    print(f"{'turns':>8}", *(f"{name:>16}" for name in names))
    for count, rows in spent.items():
        costs = [1000 * median(column) for column in zip(*rows, strict=True)]
        costs += await past_search_costs(service, f"{count}-turns")
        print(f"{count:8}", *(f"{cost:16.2f}" for cost in costs))


async def take_turn(service: memory.Memory, name: str) -> None:
    random = Random()
    query = sentence(random, "By the way, I met somebody who")
    response = ". ".join(sentence(random, "Once a man") for _ in range(4))
    session = str(uuid.uuid5(uuid.NAMESPACE_URL, name))
    async with service.turn(name, session) as turn:
        await turn.hints(query)
        await turn.save(query=query, response=response, status="complete")


async def past_search_costs(service: memory.Memory, user: str) -> list[float]:
    spent = []
    for _ in range(REPEATS // 2):
        query = sentence(Random(), "Do I know who")
        [vector] = await embed([query])
        begun = time.process_time()
        vector /= np.linalg.norm(vector)
        await service.run(user, memory.IndexedFiles.search_past, query, vector, 3)
        spent.append(1000 * (time.process_time() - begun))
    return [median(spent[1:]), spent[0]]


async def main() -> None:
    service = memory.Memory(scratch.name, complete, embed, "random")
    memory.LEARN_DELAY = 0.0  # a wait, no work
    await service.open()
    await measure_facts(service)
    await measure_turns(service)
    await service.close()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with scratch:
        asyncio.run(main())
