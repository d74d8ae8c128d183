"""What memory costs: a fact search by the number of facts, a turn by the number before it.

    nice python .bench/costs.py

CPU is time.process_time (all threads), as the median of many; vectors are random, of
1536 dimensions. Another copy of memory.py: PYTHONPATH=that/folder.
"""

import asyncio
import hashlib
import json
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
scratch = tempfile.TemporaryDirectory()
os.environ["DATA_DIR"] = scratch.name  # memory.py makes it when imported

import memory  # noqa: E402

DIMENSION = 1536
FACTS = (20, 200, 2000)
TURNS = (10, 50, 1000, 5000)
REPEATS = 50  # searches; turns are measured over a whole part, so that all places count
PEOPLE = "her sister Ana|his boss|Tom from work|the neighbours|her mother|Lena|Karim"
PLACES = "Lisbon|the Alps|Kyoto|the old harbour|Montreal|a farm near Ghent|Oaxaca"
THINGS = "a violin|two cats|a sourdough starter|a red bicycle|an old camera|a kayak"
DEEDS = "bought|lost|repairs|learns to use|was given|sold|writes about|dreams of|paints"


def sentence(random: Random, who: str) -> str:
    person, place, thing, deed = (
        random.choice(words.split("|")) for words in (PEOPLE, PLACES, THINGS, DEEDS)
    )
    year = random.randrange(1990, 2025)
    return f"{who} {deed} {thing} in {place} with {person} since {year}"


async def embed(texts: list[str]) -> list[np.ndarray]:
    def vector(text: str) -> np.ndarray:
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        return np.random.default_rng(seed).standard_normal(DIMENSION, "float32")

    return [vector(text) for text in texts]


async def complete(messages: Any, schema: Any) -> str:
    return json.dumps({"operations": [], "summary": "They spoke of many things. " * 20})


async def cpu_and_wall(
    repeats: int, call: Callable[[], Awaitable[Any]]
) -> tuple[float, float]:
    """Return the median milliseconds of CPU and of wall time."""
    spent = []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        await call()
        spent.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpus, walls = zip(*spent, strict=True)
    return 1000 * median(cpus), 1000 * median(walls)


async def learned(service: memory.Memory) -> None:
    while service.tasks:
        await asyncio.wait(service.tasks)


async def know(service: memory.Memory, name: str, count: int) -> memory.User:
    """Give a user so many facts, and their vectors."""
    random, user = Random(count), service.named(name)
    async with service.turn(name, str(uuid.uuid4())) as turn:
        state = turn.state.copy()
    for n in range(count):
        at = (datetime.now(UTC) - timedelta(hours=n)).isoformat()
        fact = {"id": str(uuid.uuid4()), "text": sentence(random, "User")}
        fact |= {"kind": "episodic", "importance": random.random(), "frequency": 1}
        fact |= {"created_at": at, "last_seen_at": at, "source": "-/1"}
        state.facts[fact["id"]] = fact
    await learned(service)
    assert user.commit(user.state, state)
    user.sync_facts()
    texts = [fact["text"] for fact in state.facts.values()]
    found = [vector / np.linalg.norm(vector) for vector in await embed(texts)]
    keys = zip(state.facts, texts, strict=True)
    user.remember(list(keys), dict(zip(texts, found, strict=True)))
    assert not user.facts.missing()
    return user


async def measure_facts(service: memory.Memory) -> None:
    print("\nms of CPU, k = 8")
    print(f"{'facts':>8}{'search':>9}{'after a change':>16}{'a turn hints()':>16}")
    for count in FACTS:
        user, random = await know(service, f"{count}-facts", count), Random(1)

        async def search(change: bool = False) -> None:
            query = sentence(random, "What do I know of who")
            [vector] = await embed([query])
            vector /= np.linalg.norm(vector)
            if change:  # what a new fact makes anew, less its embedding
                user.state = user.state.copy()
                user.facts.scale = None
            user.search(query, vector, 8)

        async def prepare() -> None:
            [vector] = await embed([sentence(random, "What do I know of who")])
            vector /= np.linalg.norm(vector)

        async with service.turn(user.key, str(uuid.uuid4())) as turn:

            async def hints() -> None:
                await turn.hints(sentence(random, "What do I know of who"))

            rest, _ = await cpu_and_wall(REPEATS, prepare)  # not the service's
            calls = [search, lambda: search(change=True), hints]
            costs = [(await cpu_and_wall(REPEATS, call))[0] - rest for call in calls]
        print(f"{count:8}{costs[0]:9.2f}{costs[1]:16.2f}{costs[2]:16.2f}")
        await learned(service)


async def measure_turns(service: memory.Memory) -> None:
    print(f"\nms of a turn (begin, hints, save), median over {memory.PART_TURNS} turns")
    print(f"{'before':>8}{'CPU':>9}{'wall':>9}{'learning it, CPU':>18}")
    session, random, done = str(uuid.uuid4()), Random(2), 0

    async def take_turn() -> None:
        nonlocal done
        query = sentence(random, "By the way, I met somebody who")
        answer = sentence(random, "How nice. I once read of a man who") * 4
        async with service.turn("talker", session) as turn:
            await turn.hints(query)
            await turn.save(query=query, response=answer, status="complete")
        done += 1

    for count in TURNS:
        while done < count:
            await take_turn()
            if not done % 8:
                await learned(service)
        await learned(service)
        spent, before = [], done
        for _ in range(min(memory.PART_TURNS, max(40, count))):
            spent.append(await cpu_and_wall(1, take_turn))
            cpu = time.process_time()
            await learned(service)
            spent[-1] += (1000 * (time.process_time() - cpu),)
        print(
            f"{before:8}",
            *(f"{median(column):9.2f}" for column in zip(*spent, strict=True)),
        )


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
