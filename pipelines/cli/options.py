"""Options of `train`, whose settings have no function with this signature."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import click

from pipelines.cli.command import PATH, location

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


def _flag(option: str, description: str) -> Callable[[Any], Any]:
    """Return a decorator that adds a flag. The function of the command does not get the
    flag: `pipelines.cli.output.is_given` reads it from the context of click.
    """
    return click.option(
        option,
        is_flag=True,
        expose_value=False,
        callback=lambda context, _, value: context.meta.update({option: value}),
        help=description,
    )


json_option = _flag("--json", "Print one JSON object on standard output.")
quiet_option = _flag("--quiet", "Show no progress.")
images_option = click.option(
    "--images",
    type=PATH,
    help="Base directory of relative image paths.  [default: directory of CAPTIONS]",
)
