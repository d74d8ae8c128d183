"""Does a real model learn the right facts? The cases and stories are in learning.toml.

    OPENAI_BASE_URL=… python .bench/learning.py [--story RUNS]

The model is MEMORY_MODEL, CHAT_MODEL or the server's first. `--story` starts the
service with the environment's settings, and tells it each story RUNS times.
"""

import asyncio
import json
import logging
import os
import tempfile
import tomllib
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import common
import httpx
import openai

import memory

BEFORE, NOW = (str(uuid.UUID(int=n)) for n in (1, 2))  # sessions
DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
STORIES = DATA.pop("story")
CASES = {name: case for cases in DATA.values() for name, case in cases.items()}
KNOWN = {text for case in CASES.values() for text in case.get("known", [])}


async def learn_cases(folder: Path) -> None:
    """Say what is known, then each case's turns, and compare the facts."""
    client = openai.AsyncOpenAI(api_key=os.environ.get("OPENAI_API_KEY") or "none")
    served = (await client.models.list()).data[0]
    limits = memory.Limits(getattr(served, "max_model_len", None) or 8192)
    model = os.environ.get("MEMORY_MODEL") or os.environ.get("CHAT_MODEL") or served.id

    async def complete(messages: list[Any], schema: Any) -> str:
        """Answer with what is known, or ask the model on 21 November 2026."""
        asked = json.loads(messages[-1]["content"])
        if schema["name"] == "memory_operations":
            said = [turn["query"] for turn in asked["turns"]]
            if KNOWN.issuperset(said):
                row = {"op": "add", "id": None, "kind": "profile", "importance": 0.5}
                rows = [row | {"text": text, "evidence": text} for text in said]
                return json.dumps({"operations": rows})
            asked["today"] = "2026-11-21"
            for turn in asked["turns"]:
                turn["at"] = "2026-11-21T10:00+00:00"
        last = {"role": "user", "content": json.dumps(asked, ensure_ascii=False)}
        body: Any = {"model": model, "messages": [*messages[:-1], last]}
        body |= {"temperature": 0, "max_tokens": limits.context_tokens // 4}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        reply = await client.chat.completions.create(**body)
        return reply.choices[0].message.content or ""

    facts: dict[str, list[set[str]]] = {name: [] for name in CASES}  # before, after
    async with memory.Memory(folder, complete, limits=lambda: limits) as memories:
        for part, session in (("known", BEFORE), ("turns", NOW)):
            for name, case in CASES.items():
                for said in case.get(part, []):
                    query, response = (said, "OK.") if isinstance(said, str) else said
                    async with memories.turn(name, session) as turn:
                        await turn.save(query, response)
            await memories.idle()
            for name in CASES:
                facts[name].append({f["text"] for f in await memories.facts(name)})
    rows = []
    for kind, cases in {**DATA, "all": CASES}.items():
        wrong = [name for name in cases if not is_right(cases[name], *facts[name])]
        rows.append([kind, len(cases) - len(wrong), len(cases), ", ".join(wrong)])
    common.print_table(["kind", "right", "of", "wrong"], rows)


def is_right(case: dict[str, Any], before: set[str], after: set[str]) -> bool:
    if "must" not in case:
        return before == after
    text = "\n".join(after).casefold()
    must = [any(a.casefold() in text for a in m.split("|")) for m in case["must"]]
    never = [part.casefold() in text for part in case.get("never", [])]
    return before != after and all(must) and not any(never)


async def tell_stories(runs: int, url: str) -> None:
    rows = []
    async with httpx.AsyncClient(base_url=url, timeout=900) as http:
        for name, story in STORIES.items():
            steps = [await tell(http, f"{name}-{run}", story) for run in range(runs)]
            right = [sum(step) for step in zip(*steps, strict=True)]
            rows.append([name, runs, *right, sum(map(all, steps))])
    common.print_table(["story", "runs", "at once", "learned", "ended", "all"], rows)


async def tell(http: httpx.AsyncClient, user: str, story: Any) -> list[bool]:
    """Return whether the model is told the right facts: at once, learned, ended."""

    async def say(part: str) -> str:
        turn = common.ask(http, user, str(uuid.uuid4()), story[part])
        events = [event async for event in turn]
        print(f"{user}: {story[part]} → {events[-1].get('response')!r:.99}", flush=True)
        return "pending" * events[0]["pending"] + str(events[0]["facts"])

    steps = []
    for part, both in (("use", True), ("end", False)):
        await say(part)
        if both:
            shown = await say("ask")
            steps.append(story["stays"] in shown or "pending" in shown)
        await common.wait_until_learned(http, 900)
        shown = await say("ask")
        steps.append(story["stays"] in shown and both == (story["goes"] in shown))
    return steps


def main() -> None:
    runs = common.options(__doc__, story=0).story
    logging.disable()
    with tempfile.TemporaryDirectory() as name:
        if not runs:
            asyncio.run(learn_cases(Path(name)))
            return
        settings = {"UPSTREAM_TIMEOUT": "300", **os.environ, "DATA_DIR": name}
        with closing(common.service(Path(name), **settings)) as service:
            asyncio.run(tell_stories(runs, service.url))


if __name__ == "__main__":
    main()
