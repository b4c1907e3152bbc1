"""Reads default values of options from a TOML file with one table per command."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from storage_formats.errors import UsageError


def use_defaults(context: click.Context, _option: click.Parameter, path: Path | None) -> None:
    """Use the values in the file at `path` as defaults of the options of all commands. Click calls this function."""
    if path is not None:
        assert isinstance(context.command, click.Group)
        context.default_map = _defaults(context.command, _read(path), f"{path}: ")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; check the path and the permissions") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise UsageError(f"{path} is not a TOML file: {error}; correct the file") from error


def _defaults(group: click.Group, tables: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the defaults of the commands of `group`: for each command, values by parameter name.

    Raises:
        UsageError: a name or value is not valid. The message begins with `place`.
    """
    defaults = {}
    context = click.Context(group, resilient_parsing=True)
    for name, values in tables.items():
        command = group.get_command(context, name)
        if command is None:
            raise UsageError(f"{place}there is no command {name}; use one of {', '.join(group.list_commands(context))}")
        if not isinstance(values, dict):
            raise UsageError(f"{place}{name} is not a table; write [{name}], and its options below")
        inner = f"{place}[{name}] "
        if isinstance(command, click.Group):
            defaults[name] = _defaults(command, values, inner)
        else:
            defaults[name] = _options(command, values, inner)
    return defaults


def _options(command: click.Command, values: Mapping[str, Any], place: str) -> dict[str, Any]:
    options = {
        max(option.opts, key=len).lstrip("-"): option
        for option in command.params
        if isinstance(option, click.Option) and (option.is_bool_flag or not option.is_flag)
    }
    defaults = {}
    for name, value in values.items():
        option = options.get(name)
        if option is None or option.name is None:
            raise UsageError(f"{place}{name} is not an option of this command; use one of {', '.join(options)}")
        _check(option, value, f"{place}{name}: ", click.Context(command))
        defaults[option.name] = value
    return defaults


def _check(option: click.Option, value: Any, place: str, context: click.Context) -> None:
    """Raise UsageError if `option` does not take `value`. Unlike click, reject a boolean as the value of a number."""
    if option.is_flag and not isinstance(value, bool):
        raise UsageError(f"{place}{value!r} is not true or false; write true or false")
    if option.multiple != isinstance(value, list):
        problem = (
            "is not a list; put the values in [ ]" if option.multiple else "is a list, but the option takes one value"
        )
        raise UsageError(f"{place}{value!r} {problem}")
    for each in value if option.multiple else [value]:
        if isinstance(each, dict | list) or (isinstance(each, bool) and not option.is_flag):
            raise UsageError(f"{place}{each!r} is not a text or number; correct the value")
        if isinstance(option.type, click.Path) and not isinstance(each, str):
            raise UsageError(f"{place}{each!r} is not a path; put the path in quotation marks")
        if isinstance(each, float) and isinstance(option.type, click.types.IntParamType):  # click would cut it
            raise UsageError(f"{place}{each!r} is not a whole number; correct the value")
    try:
        option.type_cast_value(context, value)
    except click.BadParameter as error:
        raise UsageError(place + error.message) from error
