"""Tools for a model. To add one, write a documented function under `@tool`.

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
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import UTC, datetime
from operator import add, floordiv, mod, mul, neg, pos, sub, truediv
from typing import Annotated, Any
from zoneinfo import ZoneInfo, available_timezones

from pydantic import Field, TypeAdapter, ValidationError

log = logging.getLogger(__name__)
# Not asyncio's own pool, which looks up host names: tools that hang would fill it.
THREADS = ThreadPoolExecutor(64, "tool")

# --- Registry ---

TOOLS: dict[str, Callable] = {}
SCHEMAS: dict[Callable, dict[str, Any]] = {}


def tool(function: Callable) -> Callable:
    """Offer a documented function to the model."""
    name = schema(function)["function"]["name"]  # ValueError: it has no docstring
    TOOLS[name] = function
    return function


def schema(function: Any) -> dict[str, Any]:
    """Return the OpenAI tool schema of a function or method, cached."""
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
    try:
        # After a timeout a thread goes on, but nobody waits for its result.
        async with asyncio.timeout(timeout) as deadline:
            result = await run_function(functions[name], arguments)
        if not isinstance(result, str):
            result = json.dumps(result, ensure_ascii=False, default=str)
        return True, bounded(result)
    except (Exception, SystemExit) as error:  # a tool is other people's code
        reason = str(error) or type(error).__name__
        if deadline.expired():  # any other TimeoutError is the tool's own
            reason = f"{name} took longer than {timeout:g} s."
        elif isinstance(error, ValidationError) and error.title.startswith("call["):
            # Pydantic gives this title only to errors in the arguments.
            wrong = [": ".join(map(str, [*e["loc"], e["msg"]])) for e in error.errors()]
            reason = f"{name} takes a JSON object. {'; '.join(wrong)}"[:1_000]
        elif not isinstance(error, ValueError):  # a ValueError is the model's mistake
            log.exception("Tool %s failed", name)
        return False, bounded(f"Error: {reason}")


def bounded(text: str) -> str:
    """Return at most 8,000 bytes of a text, without lone surrogates, as JSON needs."""
    content, mark = text.encode(errors="replace"), b"\n[cut at 8,000 bytes]"
    if len(content) > 8_000:
        content = content[: 8_000 - len(mark)] + mark
    return content.decode(errors="ignore")


async def run_function(function: Any, arguments: Any) -> Any:
    # Pydantic's adapter of a function checks the arguments, and then calls it.
    check_and_call = TypeAdapter(function).validate_python
    if inspect.iscoroutinefunction(function):
        return await check_and_call(arguments)
    work = THREADS.submit(copy_context().run, check_and_call, arguments)
    return await asyncio.wrap_future(work)


# --- The tools ---

UNITS: list[dict[str, float]] = [  # the size of each unit, one row per kind
    {"mm": 1, "cm": 10, "m": 1e3, "km": 1e6, "in": 25.4, "ft": 304.8, "mi": 1609344},
    {"mg": 0.001, "g": 1, "kg": 1e3, "t": 1e6, "oz": 28.349523125, "lb": 453.59237},
    {"ml": 1, "l": 1e3, "tsp": 4.92892159375, "cup": 236.5882365, "gal": 3785.411784},
    {"m/s": 3.6, "km/h": 1, "mph": 1.609344, "kn": 1.852},
    {"bit": 1, "byte": 8, "kB": 8e3, "MB": 8e6, "GB": 8e9, "TB": 8e12, "GiB": 2**33},
    {"K": 9, "C": 9, "F": 5},  # in ninths of a kelvin, because 5/9 is not exact
]
ZEROS = {"C": 273.15, "F": 459.67}  # degrees from absolute zero to 0 °C and 0 °F

# What `calculate` may use
OPERATORS: dict[type, Callable] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}
OPERATORS |= {ast.Div: truediv, ast.FloorDiv: floordiv, ast.Mod: mod, ast.Pow: pow}
OPERATORS |= {ast.UAdd: pos, ast.USub: neg}
FUNCTIONS = {n: vars(math)[n] for n in ("sqrt", "log", "exp", "sin", "cos", "tan")}


# 15% is per cent, but before a number, a name or a parenthesis, % is a remainder.
REMAINDER = r" ?[\w(.]| -[\w(.]"  # what follows: 7 % 4 and 7 % -4, but not 20%-4
PER_CENT = rf"([\d.]+) ?%(?!{REMAINDER})"


@tool
def calculate(expression: Annotated[str, Field(max_length=500)]) -> str:
    """Compute + - * / // % ^ sqrt exp log(x, base) pi and, of radians, sin cos tan."""
    text = expression.lower().replace("^", "**")
    # 1,234 is 1234. But if a function is called, all commas separate arguments.
    if not re.search(r"[a-z]\w* ?\(", text):
        groups = r"(?<![\d.,])\d{1,3}(,\d{3})+(?![\d,])"
        text = re.sub(groups, lambda number: number[0].replace(",", ""), text)
    text = text.replace("% of", "% *")  # else % would be a remainder by "of"
    text = re.sub(PER_CENT, r"(\1/100)", text)
    try:
        value = evaluate(ast.parse(text.strip("=? "), mode="eval").body)
        if not math.isfinite(value):
            raise OverflowError("too large")
        return str(value) if isinstance(value, int) else f"{value:.15g}"
    except (ArithmeticError, LookupError, SyntaxError, TypeError) as error:
        raise ValueError(f"no value: {type(error).__name__}: {error}") from None


def evaluate(node: Any) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id="pi"):
            return math.pi
        case ast.UnaryOp(op=op, operand=value):
            return OPERATORS[type(op)](evaluate(value))
        case ast.BinOp(left=left, op=op, right=right):
            numbers = evaluate(left), evaluate(right)
            if isinstance(op, ast.Pow):
                math.pow(*numbers)  # raises before a huge integer takes all memory
            return OPERATORS[type(op)](*numbers)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return FUNCTIONS[name](*map(evaluate, arguments))
    raise SyntaxError(f"{type(node).__name__} is not arithmetic")


@tool
def current_time(timezone: str = "") -> str:
    """Return the date and time now, here or in a time zone such as Asia/Tokyo."""
    if timezone not in {"", *available_timezones()}:
        raise ValueError(f"'{timezone[:64]}' is no IANA time zone such as Asia/Tokyo")
    now = datetime.now(UTC).astimezone(ZoneInfo(timezone) if timezone else None)
    return f"{now.isoformat(timespec='seconds')} ({now:%A}, week {now:%V})"


@tool
def convert_units(value: float, from_unit: str, to_unit: str) -> str:
    """Return a quantity in another unit, such as km, mi, kg, lb, l, cup, MB, C or F."""
    for units in UNITS:
        if from_unit in units and to_unit in units:
            size = (value + ZEROS.get(from_unit, 0)) * units[from_unit]
            result = size / units[to_unit] - ZEROS.get(to_unit, 0)
            return f"{value:.12g} {from_unit} = {result:.12g} {to_unit}"
    raise ValueError(f"the units of each kind are {[[*units] for units in UNITS]}")
