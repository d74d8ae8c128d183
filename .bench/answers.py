"""Whether a weak model answers from its hints, calls a tool where one is needed, or babbles.

    OPENAI_BASE_URL=http://127.0.0.1:8101/v1 CHAT_MODEL=… python .bench/answers.py [8]

Asks a real model for so many answers to each message, with the prompt and the tools that
the service sends, with the last line of the hints and without it.
"""

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

import openai

os.environ.setdefault("DATA_DIR", tempfile.mkdtemp())
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import main
import tools
from memory import Hints, Turn

HOME = ["User is vegetarian", "User lives in Lyon", "User has a dog named Bo"]
WORK = ["User's name is Marie", "User works as a baker", "User has a dog named Bo"]
APPS = [f"User uses {name} as a productivity tool" for name in ("Shram", "Magnet")]
CALL, SAYS = "CALL ", r"(?!CALL )(?=.*\w{3})"
CASES = {  # hints, the message, what a right answer looks like
    "in the hints": [
        (APPS, "What are the productivity tools that I use?", "(?=.*Shram).*Magnet"),
        (WORK, "What is my job?", ".*baker"),
        (HOME, "What city do I live in?", ".*Lyon"),
        (HOME, "What is my dog's name?", r".*\bBo\b"),
    ],
    "no tool needed": [
        (HOME, "Hi! How are you?", SAYS),
        (HOME, "Write a haiku about autumn.", SAYS),
        (HOME, "What is the capital of Peru?", ".*Lima"),
        ([], "What is the capital of Peru?", ".*Lima"),
    ],
    "a tool needed": [
        (HOME, "What is 4711 * 3.7?", f"{CALL}calculate|.*17[,.]?430"),
        (HOME, "How many km are 26 miles?", f"{CALL}convert_units|.*41\\.8"),
        (HOME, "What time is it in Tokyo now?", f"{CALL}current_time"),
        (HOME, "Please forget that I am a vegetarian.", f"{CALL}forget_memory"),
    ],
}
MEMORY_TOOLS = "fetch_memory", "propose_memory", "forget_memory", "search_conversations"
FUNCTIONS = [*tools.TOOLS.values(), *(getattr(Turn, name) for name in MEMORY_TOOLS)]


def schema(function):
    """Return the schema of a tool; a method's as it is bound, without `self`."""
    bound = function.__name__ in MEMORY_TOOLS
    return tools.schema(function.__get__(object()) if bound else function)


async def answers(client, count, facts, message, last_line):
    block = Hints([{"text": fact, "score": 1.0} for fact in facts], [], []).block()
    if not last_line:
        *lines, _, end = block.split("\n")
        block = "\n".join([*lines, end])
    prompt = [main.memory.as_message("system", main.SYSTEM)]
    prompt.append(main.memory.as_message("user", f"{block}\n\n{message}"))
    reply = await client.chat.completions.create(
        model=main.settings.chat_model,
        messages=prompt,
        tools=[schema(function) for function in FUNCTIONS],
        n=count,
        max_tokens=90,
    )
    said = [choice.message for choice in reply.choices]
    return [
        CALL + one.tool_calls[0].function.name if one.tool_calls else one.content or ""
        for one in said
    ]


async def run(count):
    url, key = str(main.settings.openai_base_url), main.settings.openai_api_key
    client = openai.AsyncOpenAI(base_url=url, api_key=key or "EMPTY")
    for last_line in (False, True):
        for kind, cases in CASES.items():
            right = 0
            for facts, message, wanted in cases:
                said = await answers(client, count, facts, message, last_line)
                right += sum(bool(re.match(wanted, one, re.DOTALL)) for one in said)
            line = "with the line" if last_line else "without it"
            print(f"{line}, {kind}: {right} of {count * len(cases)}", flush=True)


asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 8))
