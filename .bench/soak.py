"""Does it leak? Memory, open files and threads of the service under load.

    python .bench/soak.py [--minutes 10] [--users 200]

Eight clients talk, leave in mid-answer, read slowly, and delete sessions and users, so
that what users own stays bounded. What still grows then is a leak.
"""

import asyncio
import statistics
import tempfile
import time
import uuid
from contextlib import ExitStack, aclosing, closing
from pathlib import Path
from random import Random
from typing import Any

import common
import httpx

MESSAGES = ("I like jazz{}", "I use map{} as tools", "Recall maps!", "Do I use {}?")


async def client(n: int, http: Any, options: Any, turns: list[str]) -> None:
    random, until = Random(n), time.monotonic() + 60 * options.minutes
    while time.monotonic() < until:
        user = f"user-{random.randrange(options.users)}"
        session = str(uuid.UUID(int=random.randrange(4)))
        await talk(random, http, user, session)
        turns.append(user)
        path, chance = f"/users/{user}", random.random()
        if chance < 0.2:
            await http.delete(path + f"/sessions/{session}" * (chance > 0.02))
        elif chance < 0.4:
            await http.get(f"{path}/memories?query=tea")


async def talk(random: Random, http: Any, user: str, session: str) -> None:
    text, manner = random.choice(MESSAGES).format(random.randrange(9)), random.random()
    turn = common.ask(http, user, session, text, reasoning_mode=manner > 0.8)
    async with aclosing(turn) as events:
        async for event in events:
            # A turn fails if another client has deleted its user.
            if event["type"] == "error" and event["code"] != "storage_failed":
                raise RuntimeError(event)
            if event["type"] == "token" and manner > 0.9:
                return  # the client leaves
            await asyncio.sleep(0.02 * (manner < 0.1))  # it reads slowly


async def measure(options: Any, service: common.Process) -> list[tuple[Any, ...]]:
    """Return samples; the first and the last are of an idle service."""
    turns, samples = [], []
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        await talk(Random(0), http, "first", str(uuid.uuid4()))
        await asyncio.sleep(2)
        load = asyncio.gather(*(client(n, http, options, turns) for n in range(8)))
        while not load.done():
            samples.append((len(turns), *common.process_stats(service.pid)[1:]))
            await asyncio.wait([load], timeout=min(10, 3 * options.minutes))
        await load
        await common.wait_until_learned(http)
        await asyncio.sleep(5)  # for connections that close
    return [*samples, (len(turns), *common.process_stats(service.pid)[1:])]


def main() -> None:
    options = common.options(__doc__, minutes=10.0, users=200)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = stack.enter_context(closing(common.model(Path(name))))
        service = common.service(Path(name), **common.model_settings(model.url))
        stack.enter_context(closing(service))
        samples = asyncio.run(measure(options, service))
    turns, rss, *_ = zip(*samples[len(samples) // 2 : -1], strict=True)
    grows = 1000 * statistics.linear_regression(turns, rss).slope
    rows = [*samples[: -1 : max(1, len(samples) // 8)], samples[-1]]
    rows.append(("per 1,000 in the second half", grows, "", ""))
    common.print_table(["turns", "RSS, MB", "threads", "files"], rows)


if __name__ == "__main__":
    main()
