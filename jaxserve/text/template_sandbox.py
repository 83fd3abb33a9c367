"""The sandbox of chat templates: Jinja's, with operators, methods, filters and tests that are charged for.

Those whose cost is known are there; others are refused by name. What each costs is charged before it is done, see
`template_limits`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.text.template_limits import (
    INNER_FILTERS,
    MAX_BITS,
    MAX_WIDTH,
    Meter,
    TemplateLimitError,
    charge,
    copied,
    finalize,
    looked_in,
    ticking,
    weighed,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_METHODS: dict[type, frozenset[str]] = {
    str: _names(
        "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii"
        " isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix"
        " removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase"
        " title upper zfill"
    ),
    dict: _names("copy get items keys values"),
    list: _names("copy count index"),
    tuple: _names("count index"),
    float: frozenset(["is_integer"]),
    int: frozenset(["is_integer"]),
    bytes: frozenset(),
}
_SHALLOW = _names(
    "abs attr batch count d default first float int items last length list map random reject rejectattr reverse round"
    " safe select selectattr slice"
)
"""Filters that go over a value's items, not into them."""
_SORTING = _names("dictsort groupby max min sort unique")
_WHOLE = (
    _names(
        "capitalize center e escape forceescape format indent join lower replace string sum title tojson trim"
        " truncate upper urlencode wordcount"
    )
    | _SORTING
)
_PASSING = _names("d default map reject rejectattr select selectattr")
"""Filters that hand on what they are given: as their result, or to a test or filter that is charged by itself."""
_NUMBERED = _names("batch center indent round slice tojson truncate")
"""Filters with numbers that size what they make."""
_COMPARING = _names("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper")
_PART_UNITS = 4
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the charges of this module; its templates run inside `budgeted`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=finalize, **options)
        known = _SHALLOW | _WHOLE
        filters = {name: _limited_filter(name, made) for name, made in self.filters.items() if name in known}
        self.filters = filters | INNER_FILTERS
        self.tests = {
            name: _limited_test(name, made) if name in _COMPARING else made
            for name, made in dict[str, Any](self.tests).items()
        }
        del self.globals["lipsum"]

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        """Adds a filter under the limits of its kind."""
        self.filters[name] = _limited_filter(name, made)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(Meter().visit(source), *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See the base class; charged first."""
        _charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See the base class; charged, as filters take the many parts of an attribute's name one by one."""
        charge(_PART_UNITS)
        if isinstance(argument, tuple):
            weighed(argument)  # its hash goes into it
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See the base class."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def limited(*args: Any, **kwargs: Any) -> str:
            _charge_format(value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return limited

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See the base class; charged first."""
        owner = getattr(obj, "__self__", None)
        kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
        if kind is not None:
            _charge_method(kind, owner, obj.__name__, args)
        elif hasattr(owner, "gi_frame") or isinstance(owner, range):
            raise SecurityError(f"{type(owner).__name__}.{obj.__name__} is not available in chat templates")
        for value in (*args, *kwargs.values()):
            if kind is not None or obj is dict or isinstance(value, tuple):
                weighed(value)
        return copied(super().call(context, obj, *args, **kwargs))


def _charge_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        if isinstance(left, str):
            _charge_percent(left, right)
        return
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        return
    sequences = [each for each in (left, right) if isinstance(each, str | list | tuple | bytes)]
    if not sequences:
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "+":
        length = sum(map(len, sequences))
        # Characters are copied many at a time, items one by one.
        charge(length // 4 if isinstance(left, str) else length)
    else:
        count = right if sequences[0] is left else left
        charge(len(sequences[0]) * count if isinstance(count, int) and count > 0 else 1)


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it computes a number of more than {MAX_BITS} bits")


def _check_width(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateLimitError(f"it asks for a width of {value}; the limit is {MAX_WIDTH}")


def _charge_percent(form: str, values: Any) -> None:
    """Before `form % values`."""
    if wide := _WIDTH.search(form):
        raise TemplateLimitError(f"it formats with {wide[0][:20]!r}; widths have at most 4 digits")
    charge(len(form) + MAX_WIDTH // 10 * form.count("%"))
    for _ in range(max(1, form.count("%("))):  # a name may be there several times
        weighed(values)


def _charge_format(form: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before `form.format(...)`."""
    for _, _, spec, _ in Formatter().parse(form):
        if re.search(r"\d{5}|\{", spec or ""):
            raise TemplateLimitError("it formats with a width that is another value, or has over 4 digits")
    charge(len(form) + MAX_WIDTH // 10 * form.count("{"))
    for _ in range(form.count("{")):
        weighed((*args, *kwargs.values()))


def _charge_method(kind: type, owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Before a method of a builtin type is called; what it gives is charged afterwards too."""
    if name not in _METHODS[kind]:
        raise SecurityError(f"{kind.__name__}.{name} is not available in chat templates")
    if kind is not str:
        if name in ("count", "index"):
            weighed(owner)
        return
    charge(len(owner))
    if name in ("center", "expandtabs", "ljust", "rjust", "zfill"):
        for value in args:
            _check_width(value)
        if name == "expandtabs":
            charge(owner.count("\t") * (args[0] if args and isinstance(args[0], int) else 8))
    elif name == "replace" and len(args) >= 2:
        _charge_replace(owner, *args[:2])
    elif name == "join" and args:
        charge(len(owner) * _length(args[0]))


def _charge_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        charge(text.count(old) * len(new))


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _limited_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    charged = looked_in if name == "in" else weighed

    @wraps(test)
    def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
        weighed(value)
        for other in (*args, *kwargs.values()):
            charged(other)
        return test(value, *args, **kwargs)

    return limited


def _limited_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose work is charged before it is done, and its result afterwards."""
    at = 1 if hasattr(made, "jinja_pass_arg") else 0

    @wraps(made)
    def limited(*args: Any, **kwargs: Any) -> Any:
        before, value, others = args[:at], args[at], args[at + 1 :]
        if not hasattr(value, "__len__") and hasattr(value, "__next__"):
            value = list(ticking(value)) if name in _WHOLE else ticking(value)
        _charge_filter(name, value, others, kwargs)
        result = made(*before, value, *others, **kwargs)
        return ticking(result) if hasattr(result, "__next__") else copied(result)

    return limited


def _charge_filter(name: str, value: Any, others: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    given = (*others, *options.values())
    for other in given:
        # A text may be a name that is taken apart, a tuple may be hashed.
        if name in _PASSING and isinstance(other, list | Mapping):
            charge(1)
        else:
            weighed(other)
        if name in _NUMBERED:
            _check_width(other)
    if name in _SHALLOW:
        charge(_length(value))
        return
    weighed(value)
    size = _length(value)
    if name in _SORTING:
        for _ in range(int(math.log2(size + 2))):
            weighed(value)
    elif name == "join":
        charge(size * max((len(str(other)) for other in given), default=0))
    elif name == "replace" and len(given) >= 2:
        _charge_replace(str(value), str(given[0]), str(given[1]))
    elif name == "indent":
        width = max((len(each) if isinstance(each, str) else int(each) for each in given), default=4)
        charge((str(value).count("\n") + 1) * width)
    elif name == "format":
        _charge_percent(str(value), others or dict(options))
    elif name == "sum" and any(not isinstance(each, int | float | str | None) for each in given):
        raise TemplateLimitError("sum is for numbers")
    elif name == "tojson" and any(isinstance(each, tuple | list) and len("".join(each)) > 16 for each in given):
        raise TemplateLimitError("tojson's separators have more than 16 characters")
    elif name == "tojson":
        charge(size * sum(each for each in given if isinstance(each, int)))
