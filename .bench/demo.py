"""Start the service with a scripted model, to see it work without a key or a model.

    python .bench/demo.py     # on port 8000, or PORT; data in demo-data, or DATA_DIR

The model learns from "I use …", "I like …" and "My name is …" only, and forgets what
"I do not use … anymore" names. API_KEY and the settings for a model are not read.
"""

import asyncio
import os
import threading

import common
import uvicorn

IGNORED = ("OPENAI_", "CHAT_", "MEMORY_", "EMBEDDING_", "RERANK_", "API_KEY")
port = common.free_port()
model = common.serve_model(port=port, gap=0.03, learning=0.1)
threading.Thread(target=asyncio.run, args=(model,), daemon=True).start()
for name in [name for name in os.environ if name.startswith(IGNORED)]:
    del os.environ[name]
os.environ |= common.model_settings(f"http://127.0.0.1:{port}")
os.environ.setdefault("DATA_DIR", "demo-data")
print(f"The model is a stand-in with simple rules, on port {port}.", flush=True)
uvicorn.run("main:app", port=int(os.environ.get("PORT", "8000")))
