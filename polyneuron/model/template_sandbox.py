"""A jinja2 sandbox in which a hostile template ends in an error, soon and in bounded memory.

jinja2's own sandbox keeps a template from Python's insides. Here each thing a template does is also
metered: processor time, the size of every value it makes, and all of these together.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, MappingView
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SOURCE_CHARS_MAX = 64 * 1024  # the longest in use have about 30 000
VALUE_CHARS_MAX = 2 << 20  # of one value, with all it holds
ELEMENTS_MAX = 200_000  # of one list
TOTAL_MAX = 32 << 20  # characters and elements made in one rendering
CALL_COST_MAX = 64 << 20
CPU_SECONDS_MAX = 1.5
_NUMBER_BITS_MAX = 4096

_MEASURED = (str, bytes, list, tuple, dict, range, MappingView)
# Calls whose result grows with a number they are given.
_WIDTH_CALLS = frozenset(
    [
        *("center", "indent", "tojson", "batch", "slice", "truncate"),  # filters
        *("ljust", "rjust", "zfill", "expandtabs"),  # methods
    ]
)
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{4})")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{4})")
# Of no use in a chat template, and slow on large values or not repeatable.
_DROPPED_FILTERS = (
    *("urlize", "random", "pprint", "xmlattr", "sum"),
    *("striptags", "wordwrap", "wordcount", "filesizeformat"),
)


class LimitError(TemplateError):
    """A template went past one of the limits."""


class Meter:
    """What one rendering has used so far."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + CPU_SECONDS_MAX
        self._left = TOTAL_MAX
        self._weights: dict[int, tuple[Any, int]] = {}  # id -> (the value, kept alive; its weight)

    def tick(self) -> None:
        """Check the time."""
        if time.thread_time() > self._deadline:
            raise LimitError(f"takes more than {CPU_SECONDS_MAX} s of processor time")

    def spend(self, value: Any) -> Any:
        """Count a new value and return it."""
        self.tick()
        if isinstance(value, int):
            if value.bit_length() > _NUMBER_BITS_MAX:
                raise LimitError("makes too large a number")
            return value
        self._left -= len(value) if isinstance(value, _MEASURED) else 1
        if self._left < 0:
            raise LimitError(f"makes more than {TOTAL_MAX} characters in all")
        if self._weigh(value) > VALUE_CHARS_MAX:
            raise LimitError(f"makes a value of more than {VALUE_CHARS_MAX} characters")
        return value

    def _weigh(self, value: Any) -> int:
        """Characters and elements in a value, a shared part counted as often as it is shown."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | Mapping):
            return 1
        known = self._weights.get(id(value))
        if known is None:
            if len(value) > ELEMENTS_MAX:
                raise LimitError(f"makes a list of more than {ELEMENTS_MAX} elements")
            parts: Any = value
            if isinstance(value, Mapping):
                parts = [*value.keys(), *value.values()]
            known = (value, 1 + sum(self._weigh(part) for part in parts))
            self._weights[id(value)] = known
        return known[1]


class OpaqueNamespace(Namespace):
    """A namespace that shows nothing of what it holds, so that showing one stays cheap."""

    def __repr__(self) -> str:
        return "<namespace>"


class GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's part for training; here its body and no more."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Hooks(NodeTransformer):
    """Sends what jinja2 does not let a sandbox see through the environment's meter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick"), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick"), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_values", *node.nodes)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("spend", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("spend", node) if isinstance(node.arg, nodes.Slice) else node

    def _spend(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _call("spend", node)

    visit_List = visit_Dict = visit_Compare = _spend


def _call(hook: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(hook), list(args), [], None, None)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a meter; set `meter` anew before each compilation and rendering."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed while compiling
            extensions=[loopcontrols, GenerationTag],
            finalize=self._output,
        )
        self.meter = Meter()
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = to_json
        tables: tuple[dict[str, Any], ...] = (self.filters, self.tests)
        for table in tables:
            table.update({name: self._metered(name, run) for name, run in table.items()})
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["namespace"] = OpaqueNamespace

    def tick(self) -> None:
        """Check the time; called at the start of each turn of a loop and each macro."""
        self.meter.tick()

    def spend(self, value: Any) -> Any:
        """Count a value a template made."""
        return self.meter.spend(value)

    def concat_values(self, *values: Any) -> Any:
        """The `~` operator."""
        return self.spend("".join([str(value) for value in values]))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products and powers that would be too large, then count the result."""
        sizes = [len(side) for side in (left, right) if isinstance(side, _MEASURED)]
        if operator == "*" and sizes:
            count = right if isinstance(right, int) else left
            if isinstance(count, int) and sizes[0] * count > VALUE_CHARS_MAX:
                raise LimitError(f"repeats something {count} times")
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_power(left, right)
        if operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise LimitError("formats with too large a width")
        return self.spend(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method; those of this class are the meter itself."""
        owner = getattr(obj, "__self__", None)
        if owner is self:
            return obj(*args)  # jinja2 adds keywords of its own
        if isinstance(owner, str | bytes | list | tuple):
            name = getattr(obj, "__name__", "")
            self._check_call(name, (owner, *args), kwargs)
        return self.spend(super().call(context, obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Subscripts and, in filters, the parts of an attribute's name."""
        self.meter.tick()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` of a string, whose fields can ask for any width."""
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and _WIDE_BRACES.search(owner):
            raise LimitError("formats with too large a width")
        return super().wrap_str_format(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Hooks().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]

    def _output(self, value: Any) -> Any:
        return self.spend(value if isinstance(value, str) else str(value))

    def _metered(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._check_call(name, args, kwargs)
            return self.spend(run(*args, **kwargs))

        return metered

    def _check_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call costs at most the product of the two largest sizes it is given."""
        values = [*args, *kwargs.values()]
        sizes = [len(value) for value in values if isinstance(value, _MEASURED)]
        sizes += [ELEMENTS_MAX for value in values if isinstance(value, Iterator)]
        if name in _WIDTH_CALLS:
            sizes += [value for value in values if isinstance(value, int)]
        largest, second, *_ = [*sorted(sizes, reverse=True), 1, 1]
        if largest * second > CALL_COST_MAX or (name in _WIDTH_CALLS and largest > VALUE_CHARS_MAX):
            raise LimitError(f"{name}: too large")
        if name == "format" and values and _WIDE_PERCENT.search(str(values[0])):
            raise LimitError("formats with too large a width")

    @staticmethod
    def _check_power(left: int, right: int) -> None:
        if left.bit_length() * right > _NUMBER_BITS_MAX:
            raise LimitError(f"a power with the exponent {right}")


def to_json(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: not escaped for HTML, unlike jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def render_limited(environment: LimitedEnvironment, pieces: Iterator[str]) -> str:
    """Join what a template generates."""
    found: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > VALUE_CHARS_MAX:
            raise LimitError(f"writes more than {VALUE_CHARS_MAX} characters")
        environment.tick()
        found.append(piece)
    return "".join(found)
