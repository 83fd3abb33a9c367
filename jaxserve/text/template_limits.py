"""What one rendering of a chat template may cost: a sandbox that counts work before it is done.

A template is a program of the model's author. Jinja's sandbox keeps it from the server's objects, not from running for
ever, or from asking for a string of a gigabyte. Nothing can stop a thread inside such an operation, so here each is
charged to a `Budget` before it begins: turns of loops and calls of macros by the size of their bodies; copies,
comparisons, conversions and output by the characters and items they go over, counted as often as they are reached.
When the budget is used up, the rendering ends with `TemplateLimitError`. Numbers of 4096 bits, widths of 10000 and
nesting of 256 levels are the most there is.

Filters, tests and methods whose cost is known are there; others are refused by name. Whatever constants a template
has are worked out while it is rendered, not while it is compiled, so they count too.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_UNITS = 32_000_000
"""Of a rendering, besides `UNITS_PER_CHAR` for each character of its messages; a unit takes 3 to 30 ns."""
UNITS_PER_CHAR = 64
QUICK_UNITS = 200_000
"""Of a rendering on a thread that must not wait."""
MAX_SECONDS = 5.0
"""Processor time of the thread that renders."""
MAX_WIDTH, MAX_BITS, MAX_DEPTH = 10_000, 4096, 256
_LOOK_UNITS = 500_000
_STEP_UNITS, _NODE_UNITS, _ITEM_UNITS = 20, 4, 16
_SCALARS = frozenset((int, float, bool, type(None)))


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
_NUMBERED = _names("batch center indent round slice tojson truncate")
"""Filters with numbers that size what they make."""
_COMPARING = _names("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper")
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")


class TemplateLimitError(Exception):
    """A template asked for more than a rendering may cost."""


class NotQuickError(Exception):
    """Something takes longer than a `quick_rendering` may."""


class Budget:
    """What is left to one rendering.

    Args:
      units: of work.
    """

    def __init__(self, units: int) -> None:
        self._all = self._left = units
        self._look_at = max(units - _LOOK_UNITS, 0)
        self._ends_at = time.thread_time() + MAX_SECONDS

    def charge(self, units: int) -> None:
        """Takes units off; TemplateLimitError when there are no more, or the time is over."""
        self._left -= units
        if self._left < self._look_at:
            if self._left < 0:
                raise TemplateLimitError(f"it needs more than {self._all} units of work (loops and characters)")
            if time.thread_time() > self._ends_at:
                raise TemplateLimitError(f"it needs more than {MAX_SECONDS:g} s")
            self._look_at = max(self._left - _LOOK_UNITS, 0)


class _State(threading.local):
    budget: Budget | None = None
    is_quick = False


_state = _State()


@contextmanager
def quick_rendering() -> Iterator[None]:
    """Renderings of this thread get `QUICK_UNITS` meanwhile."""
    _state.is_quick = True
    try:
        yield
    finally:
        _state.is_quick = False


def check_not_quick() -> None:
    """Raises NotQuickError inside of a `quick_rendering`."""
    if _state.is_quick:
        raise NotQuickError


@contextmanager
def budgeted(num_chars: int) -> Iterator[None]:
    """A rendering with its budget, of messages with so many characters."""
    units = MAX_UNITS + UNITS_PER_CHAR * num_chars
    _state.budget = Budget(min(units, QUICK_UNITS) if _state.is_quick else units)
    try:
        yield
    finally:
        _state.budget = None


def _charge(units: int) -> None:
    budget = _state.budget
    assert budget is not None, "a chat template runs without a budget"
    budget.charge(units)


def _weighed(value: Any) -> Any:
    """`value`, charged as its text: each character and item, however often it is shared."""
    if isinstance(value, str):
        _charge(len(value))
        return value
    level, depth = [value], 0
    while level := [inner for item in level for inner in _items(item) if type(inner) not in _SCALARS]:
        depth += 1
        if depth > MAX_DEPTH:
            raise TemplateLimitError(f"it nests values deeper than {MAX_DEPTH} levels")
    return value


def _items(value: Any) -> Iterable[Any]:
    """What is inside of a value, charged."""
    if isinstance(value, str):
        _charge(len(value))
        return ()
    if isinstance(value, Namespace):
        value = value._Namespace__attrs  # type: ignore[attr-defined]
    if isinstance(value, dict):
        _charge(_ITEM_UNITS * (1 + 2 * len(value)))
        return (*value.keys(), *value.values())
    if hasattr(value, "__len__") and hasattr(value, "__iter__"):
        _charge(_ITEM_UNITS * (1 + len(value)))
        return tuple(value)
    return ()


def _text(value: Any) -> str:
    """`value` as text, before and after which it is charged."""
    if isinstance(value, str):
        _charge(8 + len(value))
        return value
    _weighed(value)
    text = str(value)
    _charge(8 + len(text))
    return text


def _copied(value: Any) -> Any:
    """`value`, which was made as a copy, charged by its length."""
    if isinstance(value, str | list | tuple | dict):
        _charge(1 + len(value))
    return value


def _counted(value: Any) -> Any:
    """`value`, to be iterated over: charged by its length, or as its items come."""
    if hasattr(value, "__len__"):
        _charge(len(value))
        return value
    return _ticking(value) if hasattr(value, "__iter__") else value


def _ticking(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _charge(_STEP_UNITS)
        yield item


@pass_context
def _finalize(_: Context, value: Any) -> str:
    # With a context it is no constant to the compiler, which would work out `{{ 'a' * 10**9 }}`.
    return _text(value)


class _Meter(NodeTransformer):
    """Writes the charges into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._add_step(node)
        node.iter = _through("_counted", node.iter)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._add_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._add_step(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._add_step(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through("_weighed", node.expr)
        for operand in node.ops:
            operand.expr = _through("_weighed", operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_through("_text", each) for each in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("_copied", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through("_copied", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through("_copied", node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _through("_weighed", pair.key)
        return _through("_copied", node)

    def _add_step[N: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block](self, node: N) -> N:
        size = sum(1 for _ in node.find_all(nodes.Node))
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        cost = nodes.Const(_STEP_UNITS + _NODE_UNITS * size + literal, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_through("_charge", cost, always=True), lineno=node.lineno))
        return node


def _through(name: str, node: nodes.Expr, always: bool = False) -> nodes.Expr:
    """An expression, given to an inner filter."""
    if isinstance(node, nodes.Const) and not always:
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the charges of this module; its templates run inside `budgeted`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_finalize, **options)
        known = _SHALLOW | _WHOLE
        filters = {name: _limited_filter(name, made) for name, made in self.filters.items() if name in known}
        self.filters = filters | {each.__name__: each for each in (_charge, _weighed, _text, _copied, _counted)}
        self.tests = {
            name: _limited_test(made) if name in _COMPARING else made
            for name, made in dict[str, Any](self.tests).items()
        }
        del self.globals["lipsum"]

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        """Adds a filter under the limits of its kind."""
        self.filters[name] = _limited_filter(name, made)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See the base class; charged first."""
        _charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See the base class."""
        if isinstance(argument, tuple):
            _weighed(argument)  # its hash goes into it
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

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """See the base class; charged first."""
        owner = getattr(obj, "__self__", None)
        kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
        if kind is not None:
            _charge_method(kind, owner, obj.__name__, args)
        elif hasattr(owner, "gi_frame") or isinstance(owner, range):
            raise SecurityError(f"{type(owner).__name__}.{obj.__name__} is not available in chat templates")
        for value in (*args, *kwargs.values()):
            if kind is not None or obj is dict or isinstance(value, tuple):
                _weighed(value)
        return _copied(super().call(context, obj, *args, **kwargs))


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
        _charge(sum(map(len, sequences)))
    else:
        count = right if sequences[0] is left else left
        _charge(len(sequences[0]) * count if isinstance(count, int) and count > 0 else 1)


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
    _charge(len(form) + MAX_WIDTH // 10 * form.count("%"))
    for _ in range(max(1, form.count("%("))):  # a name may be there several times
        _weighed(values)


def _charge_format(form: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before `form.format(...)`."""
    for _, _, spec, _ in Formatter().parse(form):
        if re.search(r"\d{5}|\{", spec or ""):
            raise TemplateLimitError("it formats with a width that is another value, or has over 4 digits")
    _charge(len(form) + MAX_WIDTH // 10 * form.count("{"))
    for _ in range(form.count("{")):
        _weighed((*args, *kwargs.values()))


def _charge_method(kind: type, owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Before a method of a builtin type is called; what it gives is charged afterwards too."""
    if name not in _METHODS[kind]:
        raise SecurityError(f"{kind.__name__}.{name} is not available in chat templates")
    if kind is not str:
        if name in ("count", "index"):
            _weighed(owner)
        return
    _charge(len(owner))
    if name in ("center", "expandtabs", "ljust", "rjust", "zfill"):
        for value in args:
            _check_width(value)
        if name == "expandtabs":
            _charge(owner.count("\t") * (args[0] if args and isinstance(args[0], int) else 8))
    elif name == "replace" and len(args) >= 2:
        _charge_replace(owner, *args[:2])
    elif name == "join" and args:
        _charge(len(owner) * _length(args[0]))


def _charge_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _charge(text.count(old) * len(new))


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _limited_test(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def limited(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _weighed(value)
        return test(*args, **kwargs)

    return limited


def _limited_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose work is charged before it is done, and its result afterwards."""
    at = 1 if hasattr(made, "jinja_pass_arg") else 0

    @wraps(made)
    def limited(*args: Any, **kwargs: Any) -> Any:
        before, value, others = args[:at], args[at], args[at + 1 :]
        if not hasattr(value, "__len__") and hasattr(value, "__next__"):
            value = list(_ticking(value)) if name in _WHOLE else _ticking(value)
        _charge_filter(name, value, others, kwargs)
        result = made(*before, value, *others, **kwargs)
        return _ticking(result) if hasattr(result, "__next__") else _copied(result)

    return limited


def _charge_filter(name: str, value: Any, others: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    given = (*others, *options.values())
    for other in given:
        _weighed(other)
        if name in _NUMBERED:
            _check_width(other)
    if name in _SHALLOW:
        _charge(_length(value))
        return
    _weighed(value)
    size = _length(value)
    if name in _SORTING:
        for _ in range(int(math.log2(size + 2))):
            _weighed(value)
    elif name == "join":
        _charge(size * max((len(str(other)) for other in given), default=0))
    elif name == "replace" and len(given) >= 2:
        _charge_replace(str(value), str(given[0]), str(given[1]))
    elif name == "indent":
        width = max((len(each) if isinstance(each, str) else int(each) for each in given), default=4)
        _charge((str(value).count("\n") + 1) * width)
    elif name == "format":
        _charge_percent(str(value), others or dict(options))
    elif name == "sum" and any(not isinstance(each, int | float | str | None) for each in given):
        raise TemplateLimitError("sum is for numbers")
    elif name == "tojson" and any(isinstance(each, tuple | list) and len("".join(each)) > 16 for each in given):
        raise TemplateLimitError("tojson's separators have more than 16 characters")
    elif name == "tojson":
        _charge(size * sum(each for each in given if isinstance(each, int)))
