"""Do two services on one folder agree, also if they are killed?

    python .bench/many.py [--turns 30] [--kills 5] [--seed 1] [--folders A B]

Eight clients of two users share four sessions. Each message goes to either service,
until one acknowledges it. Meanwhile the services are killed in turn and started again.
Every third time one is asked to stop. `--folders` names a folder that is mounted twice.
"""

import asyncio
import signal
import sys
import tempfile
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import common
import crash
import httpx


async def talk(n: int, services: Any, options: Any, told: list[Any]) -> None:
    random = Random(options.seed * 100 + n)
    for turn in range(options.turns):
        (user, session), number = random.choice(crash.PLACES), 0
        while not number:
            await asyncio.sleep(random.uniform(0, 0.5))
            query = f"I like w{n}t{turn}a{random.randrange(10**6)}q"
            with suppress(httpx.HTTPError):
                url = random.choice(services).url
                async with httpx.AsyncClient(base_url=url, timeout=40) as http:
                    async for event in common.ask(http, user, session, query):
                        number = event.get("turn", 0)  # of `done`
        told.append(["done", user, session, query, number])


async def kill(services: Any, start: Any, options: Any, told: list[Any]) -> None:
    for k in range(options.kills):
        share = 8 * options.turns * (k + 1) / (options.kills + 1)
        while len(told) < share:
            await asyncio.sleep(0.02)
        by = signal.SIGTERM if k % 3 == 2 else signal.SIGKILL
        await asyncio.to_thread(services[k % 2].close, by)
        await asyncio.sleep(1)
        services[k % 2] = await asyncio.to_thread(start, options.folders[k % 2])


async def facts_of(url: str) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=40) as http:
        await common.wait_until_learned(http)
        found = [await http.get(f"/users/{user}/memories") for user in ("ann", "bob")]
        return [fact["id"] for one in found for fact in one.json()["memories"]]


async def measure(services: Any, start: Any, options: Any) -> tuple[list[Any], bool]:
    """Return what was acknowledged, and whether both services know the same facts."""
    told: list[Any] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(kill(services, start, options, told))
        for n in range(8):
            group.create_task(talk(n, services, options, told))
    told.sort(key=lambda row: row[-1])  # clients may hear of two turns in any order
    await asyncio.sleep(3)  # for what would be learned twice
    first, second = [await facts_of(service.url) for service in services]
    return told, first == second


def main() -> None:
    one = [Path("data")] * 2
    options = common.options(__doc__, turns=30, kills=5, seed=1, folders=one)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = stack.enter_context(closing(common.model(Path(name))))
        settings = common.model_settings(model.url)

        def start(data: Path) -> common.Process:
            settings["DATA_DIR"] = str(Path(name, data))
            return common.service(Path(name), **settings)

        services = [start(data) for data in options.folders]
        stack.callback(lambda: [service.close() for service in services])
        told, same = asyncio.run(measure(services, start, options))
        for service in services:
            service.close()
        folder = Path(name, options.folders[0])
        [(_, found, _)] = crash.run_process(crash.check, folder, told)
    found["services differ"] = int(not same)
    common.print_table(["acknowledged", *found], [[len(told), *found.values()]])
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
