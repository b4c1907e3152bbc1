"""Filter expressions over the columns of the rows table, such as `width > 800 and licence = 'cc0'`.

Expressions from untrusted users are safe: an expression can only compare columns and constants, and the size of an
expression is limited. Types are checked before rows are read.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lark import Lark, Token
from lark.exceptions import UnexpectedInput, UnexpectedToken, VisitError
from lark.visitors import Transformer_NonRecursive, v_args
from numpy.typing import NDArray

from storage_formats.errors import UsageError
from storage_formats.format.rows import type_name

MAX_CHARACTERS = 4096
MAX_PARTS = 100
"""Largest number of conditions, and of `not`, `and` and `or`, in an expression."""
MAX_WILDCARDS = 8
"""Largest number of % and _ in a pattern, which bounds the time of a match."""

Condition: TypeAlias = Callable[[pa.Table], Any]
"""Computes for each row of a table whether the row passes; null if a compared value is null."""

# A subset of SQL. The LALR parser takes linear time and does not use recursion.
_GRAMMAR = r"""
?start: disjunction
?disjunction: conjunction ("or"i conjunction)*
?conjunction: condition ("and"i condition)*
?condition: "not"i condition -> negation
    | operand COMPARISON operand -> comparison
    | operand "is"i "null"i -> is_null
    | operand "is"i "not"i "null"i -> is_not_null
    | operand "in"i "(" literal ("," literal)* ")" -> one_of
    | operand "not"i "in"i "(" literal ("," literal)* ")" -> none_of
    | operand "like"i text -> like
    | operand "not"i "like"i text -> not_like
    | operand -> truth
    | "(" disjunction ")"
?operand: NAME -> column
    | QUOTED_NAME -> quoted_column
    | literal
?literal: text
    | INTEGER -> integer
    | FRACTION -> fraction
    | "true"i -> true
    | "false"i -> false
text: TEXT

COMPARISON: "=" | "!=" | "<>" | "<=" | ">=" | "<" | ">"
NAME: /[^\W\d][\w.]*/i
QUOTED_NAME: /"(?:[^"]|"")+"/
TEXT: /'(?:[^']|'')*'/
FRACTION.2: /[+-]?(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?\d+[eE][+-]?\d+/
INTEGER: /[+-]?\d+/
%ignore /\s+/
"""
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_NUMBER, _TEXT, _TRUTH, _TIME, _TEXTS = "number", "text", "boolean", "timestamp", "list of texts"
_EXAMPLE = "write conditions such as width > 800 and uri like '%.jpg'"
_TIME_EXAMPLE = "a date and time in quotes, such as '2026-01-31T12:00'"
_SHOWN = 30
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Where:
    """A filter expression that is valid for the columns of an index.

    Attributes:
        columns: sorted names of the columns that the expression reads.
        condition: function that evaluates the expression on a table.
    """

    columns: tuple[str, ...]
    condition: Condition

    def passes(self, table: pa.Table) -> NDArray[np.bool_]:
        """Return which rows of `table` pass, bool [rows].

        As in SQL, a row does not pass if the result of the expression is null.
        """
        mask: NDArray[np.bool_] = pc.fill_null(self.condition(table), False).to_numpy()
        return mask


def parse_where(text: str, schema: pa.Schema) -> Where:
    """Parse a filter expression and check its types.

    Args:
        text: the expression.
        schema: columns that the expression may name.

    Raises:
        UsageError: the expression is too long or malformed, names an unknown column, or compares different types.
    """
    if len(text) > MAX_CHARACTERS:
        raise _error(f"the filter has {len(text)} characters, more than {MAX_CHARACTERS}; shorten the filter")
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        at = error.pos_in_stream or 0
        problem = f"the filter cannot be read from character {at + 1} on, {text[at : at + _SHOWN]!r}"
        if not text.strip():
            problem = "the filter is empty"
        elif isinstance(error, UnexpectedToken) and error.token.type == "$END":
            problem = f"the filter ends too early, after {text.rstrip()[-_SHOWN:]!r}"
        raise _error(f"{problem}; {_EXAMPLE}") from error
    conditions = _Conditions(schema)
    try:
        condition = conditions.transform(tree)
    except VisitError as error:
        raise error.orig_exc from None
    return Where(tuple(sorted(conditions.columns)), condition)


@functools.cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", maybe_placeholders=False)


def _error(message: str) -> UsageError:
    return UsageError(f"invalid filter: {message}", parameter="where")


@dataclass(frozen=True)
class _Column:
    """A column of the rows table."""

    name: str
    arrow_type: pa.DataType

    @property
    def kind(self) -> str:
        """Kind of the values: "number", "text", "boolean", "timestamp" or "list of texts"."""
        if pa.types.is_boolean(self.arrow_type):
            return _TRUTH
        if pa.types.is_list(self.arrow_type):
            return _TEXTS
        if pa.types.is_timestamp(self.arrow_type):
            return _TIME
        return _TEXT if pa.types.is_string(self.arrow_type) else _NUMBER

    def __str__(self) -> str:
        return f"the column {self.name} ({type_name(self.arrow_type)})"

    def scalar(self, constant: _Constant) -> pa.Scalar:
        """Convert `constant` to a scalar that can be compared with the values of this column."""
        kind = _TEXT if self.kind in (_TEXTS, _TIME) else self.kind
        if constant.kind != kind:
            wanted = _TIME_EXAMPLE if self.kind == _TIME else f"a {kind}"
            raise _error(f"{self} cannot be compared with {constant}; give {wanted}")
        if self.kind == _NUMBER and not pa.types.is_integer(self.arrow_type):
            if float(constant.value) != constant.value:
                raise _error(
                    f"{self} cannot be compared with {constant}, which float64 cannot represent exactly; round the "
                    "number"
                )
            return pa.scalar(float(constant.value))
        if self.kind != _TIME:
            return pa.scalar(constant.value)
        try:
            moment = datetime.datetime.fromisoformat(str(constant.value))
            moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
            return pa.scalar(moment.astimezone(datetime.UTC), self.arrow_type)
        except (ValueError, OverflowError) as error:
            raise _error(f"{self} cannot be compared with {constant}; give {_TIME_EXAMPLE}") from error


@dataclass(frozen=True)
class _Constant:
    """A constant in an expression: a number, a text, true or false."""

    value: bool | int | float | str

    @property
    def kind(self) -> str:
        """Kind of the value: "number", "text" or "boolean"."""
        if isinstance(self.value, bool):
            return _TRUTH
        return _TEXT if isinstance(self.value, str) else _NUMBER

    def __str__(self) -> str:
        return f"the constant {str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)}"


_Operand: TypeAlias = _Column | _Constant


@v_args(inline=True)
class _Conditions(Transformer_NonRecursive):  # type: ignore[type-arg]
    """Converts the syntax tree of an expression to a condition, from the leaves to the root.

    Attributes:
        columns: names of the columns that the expression reads.
    """

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__()
        self._schema = schema
        self._parts = 0
        self.columns: set[str] = set()

    def column(self, name: Token) -> _Column:
        return self._column(str(name), "; write 'is null'" if name.lower() == "null" else "")

    def quoted_column(self, name: Token) -> _Column:
        return self._column(name[1:-1].replace('""', '"'), "; a text is written in single quotes")

    def _column(self, name: str, hint: str) -> _Column:
        if name not in self._schema.names:
            columns = ", ".join(f"{field.name} ({type_name(field.type)})" for field in self._schema)
            raise _error(f"there is no column {name}{hint}; the columns are {columns}")
        self.columns.add(name)
        return _Column(name, self._schema.field(name).type)

    def text(self, text: Token) -> _Constant:
        return _Constant(text[1:-1].replace("''", "'"))

    def integer(self, digits: Token) -> _Constant:
        if len(digits) > 20 or not _INT64_MIN <= int(digits) <= _INT64_MAX:
            raise _error(f"the number {digits[:_SHOWN]} does not fit in 64 bits; write a number of at most 18 digits")
        return _Constant(int(digits))

    def fraction(self, digits: Token) -> _Constant:
        return _Constant(float(digits))

    def true(self) -> _Constant:
        return _Constant(True)

    def false(self) -> _Constant:
        return _Constant(False)

    def comparison(self, left: _Operand, token: Token, right: _Operand) -> Condition:
        self._count()
        operator = str(token)
        if isinstance(left, _Constant):
            if isinstance(right, _Constant):
                raise _error(f"{left} is compared with {right}; name a column on one side")
            left, operator, right = right, _MIRRORED.get(operator, operator), left
        if left.kind == _TRUTH and operator in _MIRRORED:
            raise _error(f"{left} can be compared only with = and !=")
        name = left.name
        if isinstance(right, _Constant):
            constant = left.scalar(right)
            if pa.types.is_integer(left.arrow_type):
                operator, constant = _among_integers(operator, constant.as_py())
            compare = _COMPARISONS[operator]
            return lambda table: _any_text(lambda array: compare(array, constant), table[name])
        if left.kind != right.kind or left.kind == _TEXTS:
            raise _error(f"{left} cannot be compared with {right}; compare numbers with numbers, or texts with texts")
        compare, other, wider = _COMPARISONS[operator], right.name, left.arrow_type
        if left.kind == _NUMBER:
            integers = pa.types.is_integer(left.arrow_type) and pa.types.is_integer(right.arrow_type)
            wider = pa.int64() if integers else pa.float64()
        return lambda table: compare(table[name].cast(wider, safe=False), table[other].cast(wider, safe=False))

    def truth(self, operand: _Operand) -> Condition:
        self._count()
        if not isinstance(operand, _Column) or operand.kind != _TRUTH:
            raise _error(f"{operand} is not a condition; {_EXAMPLE}")
        return lambda table: table[operand.name]

    def is_null(self, operand: _Operand) -> Condition:
        name = self._only_column(operand).name
        return lambda table: pc.is_null(table[name])

    def is_not_null(self, operand: _Operand) -> Condition:
        return self.negation(self.is_null(operand))

    def one_of(self, operand: _Operand, *constants: _Constant) -> Condition:
        column = self._only_column(operand)
        values = [column.scalar(constant).as_py() for constant in constants]
        if column.kind != _NUMBER:
            value_set = pa.array(values, pa.string() if column.kind == _TEXTS else column.arrow_type)
        elif pa.types.is_integer(column.arrow_type):
            value_set = pa.array([int(value) for value in values if _is_int64(value)], pa.int64())
        else:
            value_set = pa.array([float(value) for value in values], pa.float64())

        def is_in(array: Any) -> Any:
            present = pc.is_in(array.cast(value_set.type), value_set=value_set)
            return pc.if_else(pc.is_valid(array), present, pa.scalar(None, pa.bool_()))

        return lambda table: _any_text(is_in, table[column.name])

    def like(self, operand: _Operand, pattern: _Constant) -> Condition:
        column, text = self._only_column(operand), str(pattern.value)
        if column.kind not in (_TEXT, _TEXTS):
            raise _error(f"'like' needs a column of texts, not {column}")
        if sum(map(text.count, "%_")) > MAX_WILDCARDS:
            raise _error(f"the pattern {text[:_SHOWN]!r} has more than {MAX_WILDCARDS} wildcards; use fewer")
        return lambda table: _any_text(lambda array: pc.match_like(array, text), table[column.name])

    def none_of(self, operand: _Operand, *constants: _Constant) -> Condition:
        return self.negation(self.one_of(operand, *constants))

    def not_like(self, operand: _Operand, pattern: _Constant) -> Condition:
        return self.negation(self.like(operand, pattern))

    def negation(self, condition: Condition) -> Condition:
        self._count()
        return lambda table: pc.invert(condition(table))

    def conjunction(self, *conditions: Condition) -> Condition:
        self._count()
        return lambda table: functools.reduce(pc.and_kleene, (condition(table) for condition in conditions))

    def disjunction(self, *conditions: Condition) -> Condition:
        self._count()
        return lambda table: functools.reduce(pc.or_kleene, (condition(table) for condition in conditions))

    def _count(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _error(f"the filter has more than {MAX_PARTS} conditions; shorten the filter")

    def _only_column(self, operand: _Operand) -> _Column:
        self._count()
        if not isinstance(operand, _Column):
            raise _error(f"{operand} is not a column; {_EXAMPLE}")
        return operand


def _any_text(condition: Callable[[Any], Any], values: Any) -> Any:
    """Return for each value whether `condition` is true.

    For a list, return whether `condition` is true for any text in it.
    """
    if not pa.types.is_list(values.type):
        return condition(values)
    lists = values.combine_chunks()
    holds = np.asarray(pc.fill_null(condition(lists.flatten()), False).to_numpy(zero_copy_only=False), dtype=np.bool_)
    result = np.zeros(len(lists), dtype=np.bool_)
    result[pc.list_parent_indices(lists).to_numpy()[holds]] = True
    return pa.chunked_array([pa.array(result, mask=pc.is_null(lists).to_numpy(zero_copy_only=False))])


def _among_integers(operator: str, number: int | float) -> tuple[str, pa.Scalar]:
    """Replace a comparison with any number by an equivalent comparison with a 64-bit integer.

    Args:
        operator: operator of the comparison `column operator number`. The column contains 64-bit integers.
        number: right side of the comparison.

    Returns:
        (operator, 64-bit integer) of a comparison with the same result for every 64-bit integer.
    """
    if _is_int64(number):
        return operator, pa.scalar(int(number))
    is_upper = operator in ("<", "<=")
    beyond = not _INT64_MIN <= number <= _INT64_MAX
    if operator in ("=", "!=", "<>") or beyond:
        always = operator in ("!=", "<>") or (operator != "=" and is_upper == (number > 0))
        return ">=" if always else "<", pa.scalar(_INT64_MIN)
    return ("<=", pa.scalar(math.floor(number))) if is_upper else (">=", pa.scalar(math.ceil(number)))


def _is_int64(number: int | float) -> bool:
    return _INT64_MIN <= number <= _INT64_MAX and int(number) == number
