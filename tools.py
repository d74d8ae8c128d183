"""Tools for a model. To add one, write a documented function under `@tool`, below."""

import ast
import asyncio
import contextvars
import inspect
import json
import logging
import math
import re
import zoneinfo
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from operator import add, floordiv, mod, mul, neg, pos, sub
from typing import Any

from pydantic import TypeAdapter, ValidationError

log = logging.getLogger(__name__)
MAX_RESULT_BYTES = 8_000  # of one result, about 2,000 tokens
# Of our own: in asyncio's, six tools that hang keep the service from looking up names.
THREADS = ThreadPoolExecutor(64, "tool")

# --- Registry ---

TOOLS: dict[str, Callable] = {}
SCHEMAS: dict[Callable, dict[str, Any]] = {}


def tool(function: Callable) -> Callable:
    """Offer a function to the model; ValueError if it has no docstring."""
    TOOLS[schema(function)["function"]["name"]] = function
    return function


def schema(function: Any) -> dict[str, Any]:
    """Return the OpenAI tool schema of a function; one dict for all callers, read only."""
    plain = getattr(function, "__func__", function)  # a method would keep its object
    if plain not in SCHEMAS:
        name, description = function.__name__, inspect.getdoc(function)
        if not description:
            raise ValueError(f"{name} needs a docstring")
        takes = TypeAdapter(function).json_schema()
        for parameter in takes["properties"].values():
            parameter.pop("title", None)  # says "Timezone" beside timezone
        described = {"name": name, "description": description, "parameters": takes}
        SCHEMAS[plain] = {"type": "function", "function": described}
    return SCHEMAS[plain]


# --- Calling ---


async def call_tool(
    functions: Mapping[str, Callable], name: str, arguments: dict | None, timeout: float
) -> tuple[bool, str]:
    """Run one tool call; return whether it worked and the text for the model.

    What the model or the tool does wrong comes back as text, it is not raised. After
    `timeout` seconds the thread of a synchronous tool runs on. `arguments` are None if
    what the model sent was not a JSON object.
    """
    try:
        async with asyncio.timeout(timeout) as limit:
            ok, text = True, await _run(functions, name, arguments)
    except (Exception, SystemExit) as error:  # other people's code: the turn goes on
        ok, text = False, f"Error: {str(error) or type(error).__name__}"
        if limit.expired():  # else a TimeoutError is the tool's own
            text = f"Error: {name} took longer than {timeout:g} s."
        elif not isinstance(error, ValueError):  # which says that the model asked amiss
            log.exception("Tool %s failed", name)
    content = text.encode("utf-8", "replace")  # without lone surrogates
    if len(content) > MAX_RESULT_BYTES:
        mark = f"\n[cut: {len(content)} bytes in all]"
        content = content[: MAX_RESULT_BYTES - 40] + mark.encode()
    return ok, content.decode(errors="ignore")


async def _run(functions: Mapping[str, Callable], name: str, arguments: Any) -> str:
    if name not in functions:
        names = ", ".join(functions)
        raise ValueError(f"there is no tool '{name[:64]}'; the tools are {names}.")
    function: Any = functions[name]
    call = TypeAdapter(function).validate_python  # validates, and then calls
    try:
        if inspect.iscoroutinefunction(function):
            result = await call(arguments)
        else:
            # No future holds a tool's StopIteration; from a generator it is a RuntimeError.
            once = (call(arguments) for _ in range(1))
            loop, run = asyncio.get_running_loop(), contextvars.copy_context().run
            result = await loop.run_in_executor(THREADS, run, next, once)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[:8]
        said = [": ".join(map(str, [*w["loc"], w["msg"]]))[:200] for w in wrong]
        takes = schema(function)["function"]["parameters"]
        said.append(f"{name} takes JSON: {json.dumps(takes, ensure_ascii=False)}")
        raise ValueError("\n".join(said)) from None
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=str)


# --- The tools ---

SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**", "π": "pi"})
OPERATORS: dict[type, Callable] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}
OPERATORS |= {ast.Mod: mod, ast.FloorDiv: floordiv, ast.USub: neg, ast.UAdd: pos}
OPERATORS[ast.Div] = lambda a, b: a / b if a % b else a // b  # 2^100 / 2 stays exact
# What could take for ever: a power must fit a float first, the others are bounded.
OPERATORS[ast.Pow] = lambda a, b: float(a) ** b and a**b
NAMES = """sqrt log log10 log2 exp sin cos tan asin acos atan atan2 radians degrees
    floor ceil gcd"""
FUNCTIONS: dict[str, Callable] = {n: getattr(math, n) for n in NAMES.split()}
FUNCTIONS |= {"abs": abs, "min": min, "max": max}
FUNCTIONS["factorial"] = lambda number: math.factorial(min(number, 171))
FUNCTIONS["round"] = lambda x, *digits: round(float(x) if digits else x, *digits)
# Factor, symbol, names; those in lower case fit any case, so B stands before b.
UNITS = {
    "length": """.001 mm millimetre | .01 cm centimetre | 1 m metre | 1000 km kilometre
        | .0254 in inch inches | .3048 ft foot feet | .9144 yd yard | 1609.344 mi mile
        | 1852 nmi""",
    "mass": """.001 mg milligram | 1 g gram | 1000 kg kilogram kilo | 1e6 t tonne
        | 6350.29318 st stone | 28.349523125 oz ounce | 453.59237 lb pound""",
    "temperature": "1 K k kelvin | 1 °C c celsius | .5555555555555556 °F f fahrenheit",
    "volume": """1 ml millilitre | 1000 l litre | 1e6 m3 | 4.92892159375 tsp teaspoon
        | 14.78676478125 tbsp tablespoon | 29.5735295625 fl_oz floz | 236.5882365 cup
        | 473.176473 pt pint | 946.352946 qt quart | 3785.411784 gal gallon""",
    "speed": "1 m/s | .2777777777777778 km/h kmh | .44704 mph | .5144444444444445 kn knot",
    "data": """8 byte B | 8e3 kB KB kilobyte | 8e6 MB megabyte | 8e9 GB gigabyte
        | 8e12 TB terabyte | 8e15 PB | 8192 KiB | 8388608 MiB | 8589934592 GiB
        | 8796093022208 TiB | 1 bit b | 1e3 kbit kb | 1e6 Mbit Mb | 1e9 Gbit Gb""",
}


@tool
def calculate(expression: str) -> str:
    """Return the value of (2^10 - 1) / 3 or the like: integers exact, else 15 digits.

    + - * / // % ^ ( ), pi, e, sqrt, log(x) or log(x, base), log10, log2, exp, sin, cos,
    tan, asin, acos, atan, atan2 (radians), radians, degrees, abs, round, min, max,
    floor, ceil, factorial, gcd. 20% is 0.2; 7 % 3 is the remainder; 15% of 80 is 12.
    """
    if len(expression) > 500:  # bounds the depth too
        raise ValueError("the expression is longer than 500 characters")
    text = expression.lower().replace("math.", "").translate(SIGNS)
    text = re.sub(r"%\s*of\b", "% *", " ".join(text.split()).strip("=? "))
    if not re.search(r"[a-z]\w* ?\(", text):  # in a call, commas separate arguments
        thousands = r"(?<![\w.,])\d{1,3}(,\d{3})+(?![\w,])"
        text = re.sub(thousands, lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"([\d.]+) ?%(?! ?[\w(.])", r"(\1/100)", text)
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except (ArithmeticError, LookupError, SyntaxError, TypeError) as error:
        raise ValueError(f"no value: {type(error).__name__}: {error}") from None
    return str(value) if isinstance(value, int) else f"{value + 0.0:.15g}"  # no "-0"


def _evaluate(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            pass
        case ast.Name(id="pi" | "e" as name):
            value = getattr(math, name)
        case ast.UnaryOp(op=op, operand=operand):
            value = OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right):
            value = OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            value = FUNCTIONS[name](*map(_evaluate, arguments))
        case _:
            raise SyntaxError(f"{type(node).__name__} is not arithmetic")
    if not math.isfinite(value):  # which itself raises beyond 1e308
        raise OverflowError("too large")
    return value


@tool
def current_time(timezone: str = "UTC") -> str:
    """Return date, time, weekday and ISO week now, in a time zone such as Asia/Tokyo.

    For example 2026-11-21T22:10:29+00:00 (Saturday, week 47). Not for other moments.
    """
    # Only listed names are opened: others, such as a folder's, raise what they like.
    if timezone not in {"UTC", *zoneinfo.available_timezones()}:
        raise ValueError(f"'{timezone[:64]}' is no IANA time zone such as Asia/Tokyo")
    now = datetime.now(UTC if timezone == "UTC" else zoneinfo.ZoneInfo(timezone))
    return f"{now.isoformat(timespec='seconds')} ({now:%A}, week {now:%V})"


@tool
def convert_units(value: float, from_unit: str, to_unit: str) -> str:
    """Return a quantity in another unit, such as 5 km = 3.106855961187 mi.

    mm cm m km in ft yd mi nmi, mg g kg t oz lb st, °C °F K, ml l m3 tsp tbsp cup fl_oz
    pt qt gal, m/s km/h mph kn; exactly so: bit kbit Mbit Gbit byte kB MB GB TB PB KiB
    MiB GiB TiB.
    """
    kind, symbol, factor, zero = _unit(from_unit)
    to_kind, to_symbol, to_factor, to_zero = _unit(to_unit)
    if kind != to_kind:
        raise ValueError(f"{symbol} is {kind}, but {to_symbol} is {to_kind}")
    result = (value + zero) * factor / to_factor
    if to_zero:  # 32 °F is 0 °C, not 5.7e-14
        result = round(result - to_zero, 9) + 0.0
    return f"{value:.13g} {symbol} = {result:.13g} {to_symbol}"


def _unit(name: str) -> tuple[str, str, float, float]:
    key = re.sub(r"(?i)degrees?|[\s°^._-]", "", name[:64]).replace("³", "3")
    key = re.sub(r"(met|lit)er", r"\1re", key)
    spellings = {key, key.lower(), key.lower().removesuffix("s")}
    for kind, rows in UNITS.items():
        for factor, symbol, *names in map(str.split, rows.split("|")):
            if spellings & {symbol, *names}:
                zero = {"°C": 273.15, "°F": 459.67}.get(symbol, 0.0)
                return kind, symbol, float(factor), zero
    raise ValueError(f"'{name[:64]}' is not a unit that the description lists")
