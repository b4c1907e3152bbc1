"""Converts parsed JSON to dataclasses, and checks the types of the values. Converts
dataclasses to JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

from storage_formats.arguments import shown


def read_json(kind: Any, value: Any, name: str = "it") -> Any:
    """Convert `value`, parsed JSON, to the type `kind`, and check the types of all its
    members. Members that a dataclass does not have are left out.

    Integers must be in 0..2^63 - 1. Booleans are not accepted as numbers.

    Args:
        kind: a plain type such as `int`, a dataclass, a `TypedDict`, or a class with
            the method `from_json`. Also `X | None`, `tuple[X, ...]`, `list[X]` or
            `dict[str, X]` of such a type X.
        name: name of the value for error messages.

    Raises:
        KeyError, TypeError, ValueError: a member is missing, of another type, or not
            valid.
    """
    shape = _shape_of(kind)
    plain = shape.plain
    if value is None and shape.is_optional:
        return None
    if shape.from_json is not None:
        return shape.from_json(value)
    if shape.members is not None:
        members = {
            member: read_json(shape.members[member], each, f"{name}.{member}")
            for member, each in read_json(dict, value, name).items()
            if member in shape.members
        }
        # A value for a `TypedDict` is only checked, and returned with all its members.
        return value if shape.is_typed else plain(**members)
    if plain is tuple and isinstance(value, list):
        return tuple(read_json(shape.items, each, name) for each in value)
    # JSON may write a float without a fraction, which Python parses as an int.
    accepted = int | float if plain is float else plain
    # In Python, a boolean is an integer.
    is_bool = isinstance(value, bool) and plain is not bool
    if plain is not Any and (is_bool or not isinstance(value, accepted)):
        raise TypeError(f"{name} must be of type {plain.__name__}, got {shown(value)}")
    if plain is int and not 0 <= value < 1 << 63:
        raise ValueError(f"{name} must be in 0..2^63 - 1, got {shown(value)}")
    if plain is list:
        return [read_json(shape.items, each, name) for each in value]
    # The values of a `dict` without type arguments are not checked.
    if plain is dict and shape.items is not None:
        return {key: read_json(shape.items, each, name) for key, each in value.items()}
    return value


class _Shape(NamedTuple):
    """What `read_json` must know of a type.

    Attributes:
        is_optional: True if the type is `X | None`. The other attributes describe X.
        plain: the type without its arguments.
        from_json: the method of this name, if the type has it.
        is_typed: True for a `TypedDict`.
        members: types of the members of a dataclass or a `TypedDict`.
        items: type of the items of a tuple or a list, or of the values of a `dict`.
    """

    is_optional: bool
    plain: Any
    from_json: Callable[[Any], Any] | None
    is_typed: bool
    members: Mapping[str, Any] | None
    items: Any


# An index of many changes has thousands of values, of few types.
@functools.cache
def _shape_of(kind: Any) -> _Shape:
    is_optional = NoneType in get_args(kind)
    if is_optional:
        (kind,) = {*get_args(kind)} - {NoneType}
    plain = get_origin(kind) or kind
    items = None
    if plain in (tuple, list) and get_args(kind):
        items = get_args(kind)[0]
    elif plain is dict and get_args(kind):
        items = get_args(kind)[1]
    is_typed = typing.is_typeddict(kind)
    members = None
    if is_typed or dataclasses.is_dataclass(kind):
        members = typing.get_type_hints(kind)
    from_json = getattr(kind, "from_json", None)
    return _Shape(is_optional, plain, from_json, is_typed, members, items)


def write_json(value: Any) -> Any:
    """Return `value` as JSON, from which `read_json` makes an equal object. Members of
    dataclasses that are None are left out.
    """
    if isinstance(value, tuple):
        return [write_json(each) for each in value]
    if hasattr(value, "from_json"):
        return value.to_json()
    if not dataclasses.is_dataclass(value):
        return value
    return {
        name: write_json(member)
        for name, member in vars(value).items()
        if member is not None
    }
