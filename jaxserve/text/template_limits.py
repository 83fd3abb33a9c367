"""What one rendering of a chat template may cost: a sandbox that counts work before it is done.

A template is a program of the model's author. Jinja's sandbox keeps it from the server's objects, not from running for
ever, or from asking for a string of a gigabyte. Nothing can stop a thread inside such an operation, so here each is
charged to a `Budget` before it begins: turns of loops and calls of macros by the size of their bodies; copies,
comparisons, conversions and output by the characters and items they go over, counted as often as they are reached.
When the budget is used up, the rendering ends with `TemplateLimitError`. Numbers of 4096 bits, widths of 10000 and
nesting of 256 levels are the most there is.

`template_sandbox` is Jinja's environment under these limits. Whatever constants a template has are worked out while it
is rendered, not while it is compiled, so they count too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_UNITS = 64_000_000
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


def charge(units: int) -> None:
    """Takes units off the budget of this thread's rendering."""
    budget = _state.budget
    assert budget is not None, "a chat template runs without a budget"
    budget.charge(units)


def _step(units: Any) -> None:
    """Charges a turn of a loop, or a call."""
    if type(units) is not int or units < 0:
        raise TemplateLimitError("it charges units itself")
    charge(units)


def weighed(value: Any) -> Any:
    """`value`, charged as its text: each character and item, however often it is shared."""
    if isinstance(value, str):
        charge(len(value))
        return value
    level, depth = [value], 0
    while level := [inner for item in level for inner in _items(item) if type(inner) not in _SCALARS]:
        depth += 1
        if depth > MAX_DEPTH:
            raise TemplateLimitError(f"it nests values deeper than {MAX_DEPTH} levels")
    return value


def looked_in(value: Any) -> Any:
    """`value`, as what `in` looks in: a mapping finds a key at once, all else is gone through."""
    if isinstance(value, Mapping):
        charge(1)
        return value
    return weighed(value)


def _items(value: Any) -> Iterable[Any]:
    """What is inside of a value, charged."""
    if isinstance(value, str):
        charge(len(value))
        return ()
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    if isinstance(value, dict):
        charge(_ITEM_UNITS * (1 + 2 * len(value)))
        return (*value.keys(), *value.values())
    if hasattr(value, "__len__") and hasattr(value, "__iter__"):
        charge(_ITEM_UNITS * (1 + len(value)))
        return tuple(value)
    return ()


def as_text(value: Any) -> str:
    """`value` as text, before and after which it is charged."""
    if isinstance(value, str):
        charge(8 + len(value))
        return value
    weighed(value)
    text = str(value)
    charge(8 + len(text))
    return text


def copied(value: Any) -> Any:
    """`value`, which was made as a copy, charged by its length."""
    if isinstance(value, str | list | tuple | dict):
        charge(1 + len(value))
    return value


def counted(value: Any) -> Any:
    """`value`, to be iterated over: charged by its length, or as its items come."""
    if hasattr(value, "__len__"):
        charge(len(value))
        return value
    return ticking(value) if hasattr(value, "__iter__") else value


def ticking(items: Iterable[Any]) -> Iterator[Any]:
    """The items, each charged as it comes."""
    for item in items:
        charge(_STEP_UNITS)
        yield item


@pass_context
def finalize(_: Context, value: Any) -> str:
    """The text of what a template writes."""
    # With a context it is no constant to the compiler, which would work out `{{ 'a' * 10**9 }}`.
    return as_text(value)


class Meter(NodeTransformer):
    """Writes the charges into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._add_step(node)
        node.iter = _through(counted, node.iter)  # type: ignore[arg-type]  # it is an expression
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._add_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._add_step(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._add_step(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through(weighed, node.expr)
        for operand in node.ops:
            operand.expr = _through(looked_in if operand.op in ("in", "notin") else weighed, operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_through(as_text, each) for each in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(copied, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through(copied, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through(copied, node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _through(weighed, pair.key)
        return _through(copied, node)

    def _add_step[N: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block](self, node: N) -> N:
        size = sum(1 for _ in node.find_all(nodes.Node))
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        cost = nodes.Const(_STEP_UNITS + _NODE_UNITS * size + literal, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_through(_step, cost, always=True), lineno=node.lineno))
        return node


def _through(function: Callable[[Any], Any], node: nodes.Expr, always: bool = False) -> nodes.Expr:
    """An expression, given to one of `INNER_FILTERS`."""
    if isinstance(node, nodes.Const) and not always:
        return node
    return nodes.Filter(node, _inner_name(function), [], [], None, None, lineno=node.lineno)


def _inner_name(function: Callable[[Any], Any]) -> str:
    # Jinja's syntax has no such name. As a text, for `map`, a template may say it; it finds nothing there to gain.
    return f"({function.__name__})"


INNER_FILTERS = {_inner_name(each): each for each in (_step, weighed, looked_in, as_text, copied, counted)}
"""Filters that `Meter` writes."""
