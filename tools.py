"""Tools for a language model: plain functions, their schemas, one safe way to call them.

`@tool` registers a function, `schema` describes it in OpenAI's format, `call_tool`
runs it with the model's arguments. To add a tool, write a function at the end.
"""

import ast
import asyncio
import difflib
import functools
import inspect
import json
import logging
import math
import operator
import re
import zoneinfo
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

logger = logging.getLogger(__name__)

MAX_RESULT_CHARS = 8_000  # of one result, about 2,000 tokens

# --- Registry ---

TOOLS: dict[str, Callable] = {}


def tool(function: Callable) -> Callable:
    """Offer a function to the model and return it unchanged.

    Raises:
        ValueError: No docstring, or a parameter without annotation or name (*args).
    """
    TOOLS[schema(function)["function"]["name"]] = function
    return function


def schema(function: Callable) -> dict[str, Any]:
    """Return the OpenAI tool schema of a function; one dict for all callers, read only."""
    return _describe(function)[0]


def _describe(function: Callable) -> tuple[dict[str, Any], TypeAdapter]:
    # By __func__: the cache keeps no object alive that was made for one turn.
    return _build(getattr(function, "__func__", function), inspect.ismethod(function))


@functools.lru_cache(maxsize=256)
def _build(function: Callable, bound: bool) -> tuple[dict[str, Any], TypeAdapter]:
    name, description = function.__name__, inspect.getdoc(function)
    if not description:
        raise ValueError(f"{name} needs a docstring: the model reads it")
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[bound:]
    for p in parameters:
        by_name = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if not by_name or p.annotation is p.empty:
            raise ValueError(f"{name}: '{p}' must be annotated and passed by name")

    # Validated apart from the call, so that a ValidationError is never the tool's own.
    @functools.wraps(function)
    def collect(**arguments: Any) -> dict[str, Any]:
        return arguments

    by_name = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
    collect.__signature__ = signature.replace(parameters=by_name)
    adapter = TypeAdapter(collect)
    takes = adapter.json_schema(schema_generator=_Untitled)
    described = {"name": name, "description": description, "parameters": takes}
    return {"type": "function", "function": described}, adapter


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # "Timezone" beside "timezone" would cost tokens in each request


# --- Calling ---


async def call_tool(
    functions: Mapping[str, Callable],
    name: str,
    arguments: dict[str, Any] | None,
    timeout: float,
) -> tuple[bool, str]:
    """Run one tool call; return whether it worked and the text for the model.

    What the model or the tool does wrong comes back as text, it is not raised.

    Args:
        functions: The tools on offer by name, such as TOOLS.
        arguments: As parsed; None if what the model sent was not a JSON object.
        timeout: Seconds. A synchronous tool's thread cannot be stopped and runs on.
    """
    try:
        async with asyncio.timeout(timeout):
            ok, text = await _run(functions, name, arguments)
    except TimeoutError:  # ours: the tool's own ends in _run
        ok, text = False, f"Error: {name} took longer than {timeout:g} s."
    # Lone surrogates cannot be sent as UTF-8; UTF-16 also joins those that are a pair.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if len(text) > MAX_RESULT_CHARS:
        note = f"\n[cut: {len(text)} characters in all]"
        text = text[: MAX_RESULT_CHARS - len(note)] + note
    return ok, text


async def _run(
    functions: Mapping[str, Callable], name: str, arguments: dict[str, Any] | None
) -> tuple[bool, str]:
    if name not in functions:
        names = ", ".join(functions)
        return False, f"Error: there is no tool '{name[:64]}'; the tools are {names}."
    function = functions[name]
    described, adapter = _describe(function)
    try:
        arguments = adapter.validate_python(arguments)
    except ValidationError as error:
        return False, _explain(name, described["function"]["parameters"], error)
    try:
        if inspect.iscoroutinefunction(function):
            result = await function(**arguments)
        else:
            # next() of a generator turns StopIteration, which would never end a
            # future, into RuntimeError.
            once = (function(**arguments) for _ in range(1))
            result = await asyncio.to_thread(next, once)
        if not isinstance(result, str):
            result = json.dumps(result, ensure_ascii=False, default=str)
        return True, result
    except ValueError as error:  # how a tool says that the model asked amiss
        reason = str(error)
    except Exception as error:  # other people's code: whatever it is, the turn goes on
        logger.exception("Tool %s failed", name)
        reason = str(error) or type(error).__name__
    return False, f"Error: {name} failed: {reason[:400]}"


def _explain(name: str, parameters: dict[str, Any], error: ValidationError) -> str:
    lines = [f"Error: the arguments do not fit {name}."]
    for wrong in error.errors(include_url=False, include_input=False)[:8]:
        if wrong["loc"]:  # empty if the arguments are no object
            where = ".".join(map(str, wrong["loc"]))[:64]
            lines.append(f"{where}: {wrong['msg'][:200]}")
    fitting = json.dumps(parameters, ensure_ascii=False)[:2_000]
    return "\n".join([*lines, f"One JSON object would fit: {fitting}"])


# --- The tools ---

MAX_BITS = 3_400  # of an integer, about 1,000 digits
SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**", "π": "pi"})


@tool
def calculate(
    expression: Annotated[str, Field(description="For example (2^10 - 1) / 3")],
) -> str:
    """Return the value of an arithmetic expression: integers exact, else 15 digits.

    + - * / // % ^ and parentheses, pi, e, sqrt, log(x) (natural), log(x, base), log10,
    log2, exp, sin, cos, tan, asin, acos, atan, atan2 (radians), radians, degrees, abs,
    round, min, max, floor, ceil, factorial, gcd. No variables, no equations.
    20% is 0.2, "15% of 80" is 12; % before a number or parenthesis is the remainder.
    """
    if len(expression) > 500:  # which bounds the depth too
        raise ValueError("the expression is longer than 500 characters")
    try:
        value = _evaluate(ast.parse(_as_python(expression), mode="eval").body)
    except (SyntaxError, LookupError, RecursionError, MemoryError):
        fits = f"numbers, + - * / // % ^, pi, e, {', '.join(FUNCTIONS)}"
        raise ValueError(f"not an arithmetic expression of {fits}") from None
    except (ArithmeticError, TypeError) as error:
        raise ValueError(f"no value: {error}") from None
    return str(value) if isinstance(value, int) else f"{value + 0.0:.15g}"  # no "-0"


def _as_python(expression: str) -> str:
    text = " ".join(expression.lower().replace("math.", "").split()).strip("=? ")
    text = re.sub(r"%\s*of\b", "% *", text.translate(SIGNS))
    if not re.search(r"[a-z]\w* ?\(", text):  # in a call, commas separate arguments
        thousands = r"(?<![\w.,])\d{1,3}(,\d{3})+(?![\w,])"
        text = re.sub(thousands, lambda match: match[0].replace(",", ""), text)
    return re.sub(r"([\d.]+) ?%(?! ?[\w(.])", r"(\1/100)", text)


def _evaluate(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            pass
        case ast.Name(id=name):
            value = {"pi": math.pi, "e": math.e}[name]
        case ast.UnaryOp(op=op, operand=operand):
            value = OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right):
            value = OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            value = FUNCTIONS[name](*map(_evaluate, arguments))
        case _:
            raise SyntaxError
    # Operands are bounded here, so that only powers and factorials look ahead.
    whole = isinstance(value, int)
    if value.bit_length() > MAX_BITS if whole else not math.isfinite(value):
        raise OverflowError("too large")
    return value


def _divide(a: float, b: float) -> int | float:
    return a // b if a % b == 0 else a / b  # 2^100 / 2 stays whole


def _power(base: float, exponent: float) -> int | float:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and (base.bit_length() - 1) * exponent > MAX_BITS:
        raise OverflowError("too large")
    return base**exponent


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
OPERATORS |= {ast.Div: _divide, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}
OPERATORS |= {ast.Pow: _power, ast.USub: operator.neg, ast.UAdd: operator.pos}
NAMES = "sqrt log log10 log2 exp sin cos tan asin acos atan atan2 radians degrees"
FUNCTIONS = {name: getattr(math, name) for name in f"{NAMES} floor ceil gcd".split()}
FUNCTIONS |= {
    "abs": abs,
    "min": min,
    "max": max,
    # Bounded: 1000! is too large, and no number here has more digits than 1100.
    "round": lambda x, digits=None: round(x, digits and max(digits, -1_100)),
    "factorial": lambda number: math.factorial(min(number, 1_000)),
}


@tool
def current_time(
    timezone: Annotated[str, Field(description="IANA name such as Asia/Tokyo")] = "UTC",
) -> str:
    """Return the present date, time, weekday and ISO week in a time zone.

    For example 2026-11-21T22:10:29+00:00 (Saturday, week 47). Not for other moments.
    """
    # Only listed names are opened: others, such as a folder's, raise what they like.
    zones = {zone.casefold(): zone for zone in zoneinfo.available_timezones()}
    wanted = timezone[:64].strip().replace(" ", "_").casefold()
    if wanted != "utc" and wanted not in zones:
        near = [zone for zone in zones if zone.endswith(f"/{wanted}")]
        near = near or difflib.get_close_matches(wanted, zones)
        hint = " or ".join([*sorted(zones[key] for key in near), "UTC"])
        raise ValueError(f"unknown time zone '{timezone[:64]}'; did you mean {hint}?")
    now = datetime.now(UTC if wanted == "utc" else zoneinfo.ZoneInfo(zones[wanted]))
    return f"{now.isoformat(timespec='seconds')} ({now:%A}, week {now:%V})"


@tool
def convert_units(
    value: Annotated[float, Field(ge=-1e99, le=1e99, allow_inf_nan=False)],
    from_unit: Annotated[str, Field(description="Symbol or name, such as km/h")],
    to_unit: Annotated[str, Field(description="Symbol or name of the same kind")],
) -> str:
    """Return a quantity in another unit, to 9 digits, such as 5 km = 3.10685596 mi.

    Length, mass, temperature, volume (US), speed, data (SI kB, IEC KiB, Mbit).
    """
    (kind, symbol, factor), (to_kind, to_symbol, to_factor) = map(
        _unit, (from_unit, to_unit)
    )
    if kind != to_kind:
        raise ValueError(f"{symbol} is {kind}, but {to_symbol} is {to_kind}")
    # Fractions, for 1 ft is 12 in, not 12.000000000000002, and 32 °F exactly 0 °C.
    base = (Fraction(str(value)) + ZEROS.get(symbol, 0)) * factor
    if kind == "temperature" and base < 0:
        raise ValueError(f"{value:g} {symbol} is below absolute zero")
    result = float(base / to_factor - ZEROS.get(to_symbol, 0))
    digits = 15 if result.is_integer() else 9
    return f"{value:.15g} {symbol} = {result:.{digits}g} {to_symbol}"


def _unit(name: str) -> tuple[str, str, Fraction]:
    key = re.sub(r"(?i)degrees?|[\s°^._-]", "", name[:64]).replace("³", "3")
    key = key.replace("meter", "metre").replace("liter", "litre")
    unit = UNITS.get(key) or UNITS.get(key.lower())
    if not unit:
        known = " ".join(dict.fromkeys(symbol for _, symbol, _ in UNITS.values()))
        raise ValueError(f"'{name[:64]}' is not one of the units {known}")
    return unit


# Of each kind: factor to its base unit, symbol, other names without spaces. Data is
# the kind in which case matters (MB is 8 Mb), elsewhere lower case is understood.
UNIT_TABLE = {
    "length": """0.001 mm millimetre | 0.01 cm centimetre | 1 m metre | 1000 km kilometre
        | 0.0254 in inch inches | 0.3048 ft foot feet | 0.9144 yd yard | 1609.344 mi mile
        | 1852 nmi nauticalmile""",
    "mass": """0.001 mg milligram | 1 g gram | 1000 kg kilogram | 1e6 t tonne
        | 28.349523125 oz ounce | 453.59237 lb pound | 6350.29318 st stone""",
    "temperature": "1 K k kelvin | 1 °C C c celsius | 5/9 °F F f fahrenheit",
    "volume": """0.001 ml millilitre | 1 l litre | 1000 m3 cubicmetre | 0.2365882365 cup
        | 0.00492892159375 tsp teaspoon | 0.01478676478125 tbsp tablespoon
        | 0.0295735295625 fl_oz floz fluidounce | 0.473176473 pt pint
        | 0.946352946 qt quart | 3.785411784 gal gallon""",
    "speed": "1 m/s | 5/18 km/h kmh kph | 0.44704 mph | 1852/3600 kn knot",
    "data": """1 bit b | 8 byte B | 8e3 kB KB kilobyte | 8e6 MB megabyte
        | 8e9 GB gigabyte | 8e12 TB terabyte | 8e15 PB petabyte | 8192 KiB kibibyte
        | 8388608 MiB mebibyte | 8589934592 GiB gibibyte | 8796093022208 TiB tebibyte
        | 1e3 kbit kb kilobit | 1e6 Mbit Mb megabit | 1e9 Gbit Gb gigabit""",
}
ZEROS = {"°C": Fraction("273.15"), "°F": Fraction("459.67")}  # above absolute zero
UNITS = {
    key: (kind, row.split()[1], Fraction(row.split()[0]))
    for kind, rows in UNIT_TABLE.items()
    for row in rows.split("|")
    for name in row.split()[1:]
    for key in (name, name + "s")
}
