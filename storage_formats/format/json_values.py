"""Converts parsed JSON to dataclasses, and checks the types of the values. Converts
dataclasses to JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from types import NoneType
from typing import Any, get_args, get_origin

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
    # `X | None` accepts None. Otherwise, the value must be an X.
    if NoneType in get_args(kind):
        if value is None:
            return None
        (kind,) = {*get_args(kind)} - {NoneType}
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    is_typed = typing.is_typeddict(kind)
    if is_typed or dataclasses.is_dataclass(kind):
        types = _types_of(kind)
        members = {
            member: read_json(types[member], each, f"{name}.{member}")
            for member, each in read_json(dict, value, name).items()
            if member in types
        }
        # A value for a `TypedDict` is only checked, and returned with all its members.
        return value if is_typed else kind(**members)
    plain = get_origin(kind) or kind
    if plain is tuple and isinstance(value, list):
        return tuple(read_json(get_args(kind)[0], each, name) for each in value)
    # JSON may write a float without a fraction, which Python parses as an int.
    accepted = int | float if plain is float else plain
    # In Python, a boolean is an integer.
    is_bool = isinstance(value, bool) and plain is not bool
    if plain is not Any and (is_bool or not isinstance(value, accepted)):
        raise TypeError(f"{name} must be of type {plain.__name__}, got {shown(value)}")
    if plain is int and not 0 <= value < 1 << 63:
        raise ValueError(f"{name} must be in 0..2^63 - 1, got {shown(value)}")
    if plain is list:
        return [read_json(get_args(kind)[0], each, name) for each in value]
    # A `dict` with type arguments is `dict[str, V]`: each value must be of type V. The
    # values of a plain `dict` are not checked.
    if plain is dict and get_args(kind):
        of_values = get_args(kind)[1]
        return {key: read_json(of_values, each, name) for key, each in value.items()}
    return value


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


_types_of = functools.cache(typing.get_type_hints)
