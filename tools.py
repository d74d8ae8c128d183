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
import unicodedata
import zoneinfo
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

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
    # By __func__, so that a method of an object made for one turn is built only once.
    bound = inspect.ismethod(function)
    return _build(function.__func__ if bound else function, bound)


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

    collect.__signature__ = signature.replace(
        parameters=[p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
    )
    adapter = TypeAdapter(collect)
    described = {"name": name, "description": description}
    described["parameters"] = _without_titles(adapter.json_schema())
    return {"type": "function", "function": described}, adapter


def _without_titles(node: Any, names: bool = False) -> Any:
    # `names`: the keys are names of parameters, which may well be "title".
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: value
        if not names and key in ("default", "const", "enum", "examples")
        else _without_titles(value, not names and key in ("properties", "$defs"))
        for key, value in node.items()
        if names or key != "title"
    }


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
    if arguments is None:
        return False, f"Error: {name} takes its arguments as one JSON object."
    try:
        arguments = adapter.validate_python(arguments)
    except ValidationError as error:
        return False, _explain(name, described["function"]["parameters"], error)
    try:
        if inspect.iscoroutinefunction(function):
            result = await function(**arguments)
        else:
            # next() of a generator, which turns StopIteration into RuntimeError: a
            # future cannot hold StopIteration and would never be done.
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
    return False, f"Error: {name} failed: {reason[:200]}"


def _explain(name: str, parameters: dict[str, Any], error: ValidationError) -> str:
    known = parameters.get("properties", {})
    lines = [f"Error: the arguments do not fit {name}."]
    for wrong in error.errors(include_url=False, include_input=False)[:8]:
        line = f"{'.'.join(map(str, wrong['loc']))[:64]}: {wrong['msg'][:200]}"
        if wrong["loc"][0] in known:
            takes = json.dumps(known[wrong["loc"][0]], ensure_ascii=False)
            line += f"; it takes {takes[:400]}"
        lines.append(line)
    required = ", ".join(parameters.get("required", [])) or "none"
    lines.append(f"Parameters: {', '.join(known) or 'none'}; required: {required}.")
    return "\n".join(lines)


# --- The tools ---

MAX_BITS = 3_400  # of an integer, about 1,000 digits
MAX_DEPTH = 250  # of an expression: 1+1+... of 500 characters just fits
SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "π": "pi"}
SIGNS = str.maketrans(SIGNS | {"²": "**2", "³": "**3"})


@tool
def calculate(
    expression: Annotated[str, Field(description="For example (2^10 - 1) / 3")],
) -> str:
    """Return the value of an arithmetic expression: integers exact, else 15 digits.

    Operators: + - * / // % ^ (or **) and parentheses; no variables, no equations.
    Functions: sqrt, log(x) (natural) or log(x, base), log10, log2, exp, sin, cos, tan,
    asin, acos, atan, atan2 (all in radians), radians, degrees, abs, round, min, max,
    floor, ceil, factorial, gcd. Constants: pi, e.
    20% is 0.2, "15% of 80" is 12; % before a number or parenthesis is the remainder.
    1,234.5 is one number, but between a function's arguments a comma separates them.
    """
    if len(expression) > 500:
        raise ValueError("the expression is longer than 500 characters")
    try:
        tree = ast.parse(_as_python(expression), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("this is not an arithmetic expression") from None
    try:
        value = _evaluate(tree.body, MAX_DEPTH)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError(f"too large: the limit is {MAX_BITS} bits, 1e308") from None
    except TypeError as error:  # a function's arguments: how many, or not whole
        raise ValueError(str(error)) from None
    return str(value) if isinstance(value, int) else f"{value + 0.0:.15g}"  # no "-0"


def _as_python(expression: str) -> str:
    text = " ".join(expression.lower().replace("math.", "").split()).strip("=? ")
    text = text.translate(SIGNS)
    # As an attribute, which binds tighter than any operator: 1 / 20% is 5.
    text = re.sub(r"%(?=\s*of\b)|%(?!\s*[\w(.])", " .percent", text)
    text = re.sub(r"\bof\b", "*", text)
    in_call = [False]  # and for each open parenthesis, whether it is a function's

    def join_thousands(match: re.Match) -> str:
        if match[0].endswith("("):
            in_call.append(match[0] != "(")
        elif match[0] == ")":
            in_call[1:] = in_call[1:-1]
        elif not in_call[-1]:
            return match[0].replace(",", "")
        return match[0]

    thousands = r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?![\w,])"
    return re.sub(rf"(?:[a-z]\w*\s*)?\(|\)|{thousands}", join_thousands, text)


def _evaluate(node: ast.AST, depth: int) -> int | float:
    if not depth:
        raise ValueError("the expression is nested too deeply")
    value_of = functools.partial(_evaluate, depth=depth - 1)
    match node:
        case ast.Constant(value=int() | float() as value):
            pass
        case ast.Name(id="pi" | "e" as name):
            value = getattr(math, name)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](value_of(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](value_of(left), value_of(right))
        case ast.Attribute(value=number, attr="percent"):
            value = _divide(value_of(number), 100)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            value = FUNCTIONS[name](*map(value_of, node.args))
        case _:
            what = getattr(getattr(node, "func", node), "id", type(node).__name__)
            names = ", ".join(FUNCTIONS)
            raise ValueError(f"'{what[:40]}' does not fit; functions: {names}; pi, e")
    # Operands are bounded here, so that only powers and factorials look ahead.
    whole = isinstance(value, int)
    if value.bit_length() > MAX_BITS if whole else not math.isfinite(value):
        raise OverflowError
    return value


def _divide(left: float, right: float) -> int | float:
    whole = isinstance(left, int) and isinstance(right, int) and left % right == 0
    return left // right if whole else left / right


def _power(base: float, exponent: float) -> int | float:
    if base < 0 and exponent % 1:
        raise ValueError("a root of a negative number is not real")
    whole = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if whole and math.log2(abs(base)) * exponent > MAX_BITS:
        raise OverflowError
    return base**exponent


def _factorial(number: int) -> int:
    if number > 450:  # 450! has 3,324 bits
        raise OverflowError
    return math.factorial(number)


def _round(number: float, digits: int = 0) -> int | float:
    if abs(digits) > 1_000:  # round(1, -10**9) would compute 10**10**9
        raise OverflowError
    return round(number, digits) if digits else round(number)


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
SAFE = (math.sqrt, math.log, math.log10, math.log2, math.exp, math.sin, math.cos)
SAFE += (math.tan, math.asin, math.acos, math.atan, math.atan2, math.radians)
SAFE += (math.degrees, math.floor, math.ceil, math.gcd, abs, min, max)
FUNCTIONS = {function.__name__: function for function in SAFE}
FUNCTIONS |= {"round": _round, "factorial": _factorial}


@tool
def current_time(
    timezone: Annotated[str, Field(description="IANA name such as Asia/Tokyo")] = "UTC",
) -> str:
    """Return the present date, time, weekday and ISO week in a time zone.

    For example 2026-11-21T22:10:29+00:00 (Saturday, week 47). Not for other moments.
    """
    now = datetime.now(UTC if timezone == "UTC" else _zone(timezone))
    return f"{now.isoformat(timespec='seconds')} ({now:%A}, week {now:%V})"


def _zone(name: str) -> zoneinfo.ZoneInfo:
    # Only listed names are opened: others, such as a folder's, raise what they like.
    zones = {zone.casefold(): zone for zone in zoneinfo.available_timezones()}
    if not zones:
        raise RuntimeError("this machine has no time zone database; only UTC works")
    wanted = name[:64].strip().replace(" ", "_").casefold()
    cities: dict[str, list[str]] = {}
    for key, zone in zones.items():
        cities.setdefault(key.rsplit("/")[-1], []).append(zone)
    found = [zones[wanted]] if wanted in zones else cities.get(wanted, [])
    if len(found) == 1:
        return zoneinfo.ZoneInfo(found[0])
    near = difflib.get_close_matches(wanted, [*zones, *cities])
    hints = found or [zone for n in near for zone in cities.get(n) or [zones[n]]]
    hint = f"; did you mean {', '.join(sorted(set(hints)))}?" if hints else ""
    raise ValueError(f"'{name[:64]}' is not the name of one time zone{hint}")


@tool
def convert_units(
    value: Annotated[float, Field(allow_inf_nan=False)],
    from_unit: Annotated[str, Field(description="Symbol or name, such as km/h")],
    to_unit: Annotated[str, Field(description="Symbol or name of the same kind")],
) -> str:
    """Return a quantity in another unit, to 9 digits, such as 5 km = 3.10685596 mi.

    Length, mass, temperature, volume, speed, data (SI kB, IEC KiB; b is bit, B byte).
    Gallon, quart, pint, cup and fl oz are US measures. No currencies.
    """
    kind, source, factor = _unit(from_unit)
    to_kind, target, divisor = _unit(to_unit)
    if kind != to_kind:
        fits = dict.fromkeys(symbol for k, symbol, _ in UNITS.values() if k == kind)
        raise ValueError(
            f"{target} is {to_kind}; {source} is {kind}: {', '.join(fits)}"
        )
    zero, to_zero = (Fraction(ZEROS.get(s, 0)) for s in (source, target))
    # Fractions, for 1 ft is 12 in, not 12.000000000000002, and 32 °F exactly 0 °C.
    base = (Fraction(str(value)) + zero) * factor
    if kind == "temperature" and base < 0:
        raise ValueError(f"{value:g} {source} is below absolute zero")
    try:
        result = float(base / divisor - to_zero)
    except OverflowError:
        raise ValueError("the result is too large") from None
    text = f"{result:.15g}"
    text = text if text.lstrip("-").isdigit() else f"{result:.9g}"
    return f"{value:.15g} {source} = {text} {target}"


def _unit(unit: str) -> tuple[str, str, Fraction]:
    name = unicodedata.normalize("NFKC", unit[:64]).strip(" .").replace("^", "")
    name = re.sub(r"\s*/\s*", "/", re.sub(r"^(?i:degrees?|deg)[\s_]*", "", name))
    name = re.sub(r"[\s_-]+", "_", name)
    folded = [key for key in UNITS if key.casefold() == name.casefold()]
    found = {UNITS[key] for key in ([name] if name in UNITS else folded)}
    if len(found) == 1:
        return found.pop()
    near = folded or difflib.get_close_matches(name, UNITS)
    symbols = sorted({UNITS[key][1] for key in near})
    hint = f"; did you mean {' or '.join(symbols)}?" if symbols else ""
    raise ValueError(f"'{unit[:64]}' is not the name of one unit{hint}")


# Of each kind: factor to its base unit, symbol, other names with _ for a space.
UNIT_TABLE = {
    "length": """1 m metre | 0.0254 in inch inches | 0.3048 ft foot feet | 0.9144 yd yard
        | 1609.344 mi mile | 1852 nmi NM nautical_mile""",
    "mass": """1 g gram | 1e6 t tonne metric_ton | 453.59237 lb lbs pound | 6350.29318 st
        stone | 28.349523125 oz ounce | 907184.74 short_ton | 1016046.9088 long_ton""",
    "temperature": "1 K kelvin | 1 °C C celsius | 5/9 °F F fahrenheit",
    "volume": """1 L l litre | 1000 m3 cubic_metre | 0.001 cm3 cc cubic_centimetre
        | 3.785411784 gal gallon | 0.946352946 qt quart | 0.473176473 pt pint
        | 0.2365882365 cup | 0.0295735295625 fl_oz fluid_ounce | 0.01478676478125 tbsp
        tablespoon | 0.00492892159375 tsp teaspoon | 4.54609 imperial_gallon
        | 0.56826125 imperial_pint | 28.316846592 ft3 cubic_foot cubic_feet""",
    "speed": """1 m/s mps metre_per_second metres_per_second | 1852/3600 kn kt kts knot
        | 5/18 km/h kmh kph kilometre_per_hour kilometres_per_hour | 0.44704 mph mi/h
        mile_per_hour miles_per_hour | 0.3048 ft/s fps foot_per_second feet_per_second""",
    "data": "1 b bit | 8 B byte",
}
ZEROS = {"°C": "273.15", "°F": "459.67"}  # of the scale, above absolute zero
# Mm, Mg and ML are there so that MM, MG and Ml are not taken for milli.
METRIC = """1e-9 n nano | 1e-6 u micro | 1e-6 μ micro | 0.001 m milli | 0.01 c centi
    | 0.1 d deci | 1000 k kilo | 1e6 M mega"""
BINARY = """1e3 K kilo | 1e3 k kilo | 1e6 M mega | 1e9 G giga | 1e12 T tera | 1e15 P peta
    | 1024 Ki kibi | 1048576 Mi mebi | 1073741824 Gi gibi | 1099511627776 Ti tebi"""
PREFIXES = {"m": METRIC, "g": METRIC, "L": METRIC, "b": BINARY, "B": BINARY}


def _read_units() -> dict[str, tuple[str, str, Fraction]]:
    units = {}
    for kind, table in UNIT_TABLE.items():
        for row in table.split("|"):
            factor, symbol, *names = row.split()
            for prefix in ["1", *PREFIXES.get(symbol, "1").split("|")]:
                times, *prefixes = prefix.split()
                short = (prefixes or [""])[0]
                unit = (kind, short + symbol, Fraction(factor) * Fraction(times))
                spelled = [p + n for p in prefixes or [""] for n in (symbol, *names)]
                for name in spelled:
                    american = name.replace("metre", "meter").replace("litre", "liter")
                    for key in (name, american):
                        units[key] = unit
                        if len(key) > 2:
                            units[key + "s"] = unit
    return units


UNITS = _read_units()  # by name
