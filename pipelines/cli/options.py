"""Options of `train`, whose settings have no function with this signature."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import click

from pipelines.cli.command import COMMON_OPTIONS, PATH, location

__all__ = ["PATH", "location"]


class Command(click.Command):
    """A command whose docstring ends with the help of its options, in a section
    "Options:".
    """

    def __init__(
        self,
        *,
        help: str,
        **settings: Any,
    ) -> None:
        text, _, section = inspect.cleandoc(help).partition("\n\nOptions:\n")
        super().__init__(help=text, **settings)
        described = dict(_DESCRIBED.findall(section))
        for parameter in self.params:
            if isinstance(parameter, click.Option) and parameter.help is None:
                text = described[parameter.opts[0]]
                parameter.help = re.sub(r"\n +", " ", text)


# Matches an option of the section "Options:" and its help. Further lines of the help
# are indented by 8 spaces.
_DESCRIBED = re.compile(r"^    (-\S+): (.*(?:\n {8}.*)*)", re.MULTILINE)
command = functools.partial(click.command, cls=Command)


def option(
    flag: str,
    kind: Any = None,
    key: str | None = None,
    **settings: Any,
) -> Callable[[Any], Any]:
    """Return a decorator that adds the option `flag` to a command, whose docstring
    contains the help of the option.

    If `kind` is bool, the option takes no value. `key` is the name of the function's
    parameter; by default, click derives the name from `flag`.
    """
    names = [flag, key] if key else [flag]
    if kind is bool:
        settings["is_flag"] = True
    return click.option(*names, type=kind, **settings)


def _common(option: click.Option) -> Callable[[Any], Any]:
    """Return a decorator that adds an option of all commands."""
    return click.option(
        option.opts[0],
        is_flag=True,
        expose_value=False,
        callback=option.callback,
        help=option.help,
    )


json_option, quiet_option = map(_common, COMMON_OPTIONS)
images_option = click.option(
    "--images",
    type=PATH,
    help="Base directory of relative image paths.  [default: directory of CAPTIONS]",
)
