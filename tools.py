# SPDX-License-Identifier: MIT-0
"""Tools for a model, each a documented function under `@tool`.

    offered = [schema(function) for function in TOOLS.values()]  # `tools` of a request
    ok, text = await call_tool(TOOLS, name, arguments, timeout=30)

To copy this file, install pydantic. It needs Python 3.11.
"""

import ast
import asyncio
import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from operator import add, floordiv, mul, neg, pos, sub, truediv
from typing import Annotated, Any
from zoneinfo import ZoneInfo, available_timezones

from pydantic import Field, TypeAdapter, ValidationError

log = logging.getLogger(__name__)
# A pool of their own, because tools that hang would fill asyncio's, which also looks up
# host names.
THREADS = ThreadPoolExecutor(64, "tool")

# --- Registry ---

TOOLS: dict[str, Callable] = {}  # by name
SCHEMAS: dict[Callable, dict[str, Any]] = {}


def tool(function: Callable) -> Callable:
    """Offer a documented function to the model."""
    TOOLS[schema(function)["function"]["name"]] = function
    return function


def schema(function: Any) -> dict[str, Any]:
    """Return the OpenAI tool schema of a documented function or method, cached."""
    # A bound method as key would keep its object alive.
    key = getattr(function, "__func__", function)
    if key not in SCHEMAS:
        if not function.__doc__:
            raise ValueError(f"{function.__name__} needs a docstring")
        spec = {"name": function.__name__, "description": inspect.getdoc(function)}
        spec["parameters"] = TypeAdapter(function).json_schema()
        SCHEMAS[key] = {"type": "function", "function": spec}
    return SCHEMAS[key]


# --- Calling ---


async def call_tool(
    functions: Mapping[str, Any], name: str, arguments: dict | None, timeout: float
) -> tuple[bool, str]:
    """Return whether one tool call worked, and the text for the model."""
    if name not in functions:
        return False, f"Error: there is no tool {name!r:.64} in {', '.join(functions)}."
    # Pydantic's adapter of a function checks the arguments, and then calls it.
    check_and_call = TypeAdapter(functions[name]).validate_python
    try:
        # After a timeout a thread goes on, but nobody waits for its result.
        async with asyncio.timeout(timeout) as deadline:
            if inspect.iscoroutinefunction(functions[name]):
                result = await check_and_call(arguments)
            else:
                work = THREADS.submit(call_in_thread, check_and_call, arguments)
                result = await asyncio.wrap_future(work)
        if not isinstance(result, str):
            result = json.dumps(result, ensure_ascii=False, default=str)
        return True, bounded(result)
    except (Exception, SystemExit) as error:  # a tool is other people's code
        reason = str(error) or type(error).__name__
        if deadline.expired():  # any other TimeoutError is the tool's own
            reason = f"{name} took longer than {timeout:g} s."
        # Another validation error is the tool's own.
        elif isinstance(error, ValidationError) and error.title.startswith("call["):
            reason = f"{name} takes a JSON object. {error}"[:1_000]
        elif not isinstance(error, ValueError):  # a ValueError is the model's mistake
            log.exception("Tool %s failed", name)
        return False, bounded(f"Error: {reason}")


def call_in_thread(function: Callable, arguments: Any) -> Any:
    try:
        return function(arguments)
    except StopIteration as error:  # of `next`; a future cannot raise it
        raise RuntimeError("StopIteration") from error


def bounded(text: str) -> str:
    """Return at most 8,000 bytes of a text, without lone surrogates."""
    content, mark = text.encode(errors="replace"), b"\n[cut at 8,000 bytes]"
    if len(content) > 8_000:
        content = content[: 8_000 - len(mark)] + mark
    return content.decode(errors="ignore")


# --- The tools ---

OPERATORS: dict[type, Callable] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}
OPERATORS |= {ast.Div: truediv, ast.FloorDiv: floordiv, ast.Pow: pow}
OPERATORS |= {ast.UAdd: pos, ast.USub: neg}


@tool
def calculate(expression: Annotated[str, Field(max_length=500)]) -> str:
    """Compute numbers with + - * / // ^ ( ). Write 15% as 0.15, and 1,234 as 1234."""
    text = expression.replace("^", "**").strip("=? ")
    try:
        value = evaluate(ast.parse(text, mode="eval").body)
        if not math.isfinite(value):
            raise OverflowError("too large")
        return str(value) if isinstance(value, int) else f"{value:.15g}"
    except (ArithmeticError, LookupError, SyntaxError, TypeError) as error:
        raise ValueError(f"no value: {type(error).__name__}: {error}") from None


def evaluate(node: Any) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=op, operand=value):
            return OPERATORS[type(op)](evaluate(value))
        case ast.BinOp(left=left, op=op, right=right):
            numbers = evaluate(left), evaluate(right)
            if isinstance(op, ast.Pow):
                math.pow(*numbers)  # raises before a huge integer takes all memory
            return OPERATORS[type(op)](*numbers)
    raise SyntaxError(f"{type(node).__name__} is not arithmetic")


@tool
def current_time(timezone: str = "") -> str:
    """Return the date and time now, here or in a time zone such as Asia/Tokyo."""
    if timezone not in {"", *available_timezones()}:
        raise ValueError(f"'{timezone[:64]}' is no IANA time zone such as Asia/Tokyo")
    now = datetime.now(UTC).astimezone(ZoneInfo(timezone) if timezone else None)
    return f"{now.isoformat(timespec='seconds')} ({now:%A}, week {now:%V})"
