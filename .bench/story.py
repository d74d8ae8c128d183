"""The story that a memory is for, on a real model: two tools, one of them given up.

    OPENAI_BASE_URL=… CHAT_MODEL=… [EMBEDDING_BASE_URL=…] python .bench/story.py [RUNS] [LINES]

Starts the service with the environment's settings and tells the story to it, as RUNS (5)
users: what they use, asked at once and again when it is learned, each in a new session;
then that one tool is used no more, and asked in a third. Prints, step by step, whether the
facts are right, in `GET …/memories` and in what is put before the model (event `memory`;
at once it is `pending`), and what the model said. All lines of all streams go to the file
LINES (story.ndjson).
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path

HERE = Path(__file__).resolve().parent
USE = "I use Shram and Magnet as productivity tools"
ASK = "What are the productivity tools that I use?"
END = "I don't use Magnet anymore"
PATIENCE = 900  # seconds for an answer, or until all is learned


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        return [json.loads(line) for line in reply if line.strip()]


def tell(url, user, message, lines):
    """Say something in a new session; return what memory stood before the model."""
    body = {"user_id": user, "session_id": str(uuid.uuid4()), "message": message}
    events = call(f"{url}/chat", body)
    for event in events:
        lines.write(json.dumps({"user": user, "message": message} | event) + "\n")
    said = events[-1].get("response", events[-1])
    print(f"    {message} → {str(said)[:150]!r}", flush=True)
    return events[0]


def learned(url, user):
    """Wait until all is learned; return the facts that stand."""
    deadline = time.monotonic() + PATIENCE
    while call(f"{url}/health")[0]["pending"]:
        assert time.monotonic() < deadline, "it is not learned"
        time.sleep(0.5)
    return [
        fact["text"] for fact in call(f"{url}/users/{user}/memories")[0]["memories"]
    ]


def right(facts, gone=""):
    """Tell whether facts hold the tools that are used, and not the one that is gone."""
    text = " ".join(facts)
    return "Shram" in text and (gone not in text if gone else "Magnet" in text)


def story(url, user, lines):
    tell(url, user, USE, lines)
    shown = tell(url, user, ASK, lines)
    texts = [fact["text"] for fact in shown["facts"]]
    steps = {"at once": bool(shown["pending"]) or right(texts)}
    for step, message, gone in (("learned", "", ""), ("gone", END, "Magnet")):
        if message:
            tell(url, user, message, lines)
        facts = learned(url, user)
        shown = [fact["text"] for fact in tell(url, user, ASK, lines)["facts"]]
        steps[step] = right(facts, gone) and right(shown, gone)
        print(f"    facts: {facts}", flush=True)
    return steps


def main():
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, good = f"http://127.0.0.1:{port}", 0
    path = sys.argv[2] if len(sys.argv) > 2 else "story.ndjson"
    command = [sys.executable, "-m", "uvicorn", "main:app", f"--port={port}"]
    command += ["--log-level=warning", "--timeout-graceful-shutdown=10"]
    with tempfile.TemporaryDirectory() as folder, open(path, "w") as lines:
        settings = {"UPSTREAM_TIMEOUT": "300", **os.environ, "DATA_DIR": folder}
        server = subprocess.Popen(command, cwd=HERE.parent, env=settings)
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.2)
            for run in range(1, runs + 1):
                steps = story(url, f"user{run}", lines)
                good += all(steps.values())
                told = ", ".join(
                    f"{s}: {'right' if ok else 'WRONG'}" for s, ok in steps.items()
                )
                print(f"run {run}: {told}", flush=True)
        finally:
            server.terminate()
            server.wait()
    print(f"{good} of {runs} runs right after each step")


if __name__ == "__main__":
    main()
