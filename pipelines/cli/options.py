"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edje_index.scoring.weights import BUNDLE_SCORE, LOGIT, PART_NAMES
from pipelines.progress.wording import parse_bytes
from storage_formats.errors import EdjeError, UsageError
from storage_formats.remote.urls import index_location, local_path


class _LocalPath(click.Path):
    """Parameter type of paths on this machine. A URL is refused, because otherwise it
    would be taken for a path inside a directory such as `s3:`.
    """

    def __init__(
        self,
        *,
        dir_okay: bool = True,
        advice: str = "",
    ) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)
        self._advice = advice

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        try:
            local_path(value, advice=self._advice)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


PATH = _LocalPath()
FILE = _LocalPath(dir_okay=False)
LOCAL_INDEX = _LocalPath(
    advice="; 'edje-index copy' copies an index to a directory and to a URL"
)


location = index_location
"""Parameter type of an index. The URL of an index stays a string, and any other
argument becomes a `Path`.
"""


def size(value: str | int) -> int:
    """Parse a size such as "8G", and return the number of bytes.

    Raises:
        click.BadParameter: `value` is not a size.
    """
    try:
        return parse_bytes(str(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


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

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. If an EdjeError names a parameter, put the name that this
        option or argument has on the command line in front of the error message.

        Raises:
            click.BadParameter: the value of a parameter is NaN.
        """
        for parameter in self.params:
            # `click.FloatRange` accepts NaN, which is neither below nor above a limit.
            value = ctx.params.get(parameter.name)
            if isinstance(value, float) and math.isnan(value):
                raise click.BadParameter("nan is not a number", ctx, parameter)
        try:
            return super().invoke(ctx)
        except EdjeError as error:
            # The error may also name an option of `edje-index` itself, such as --log,
            # which stands before the name of the command.
            for parameter in (*self.params, *ctx.find_root().command.params):
                if parameter.name == error.parameter:
                    name = max(parameter.opts, key=len)
                    if isinstance(parameter, click.Argument):
                        name = parameter.metavar or parameter.name.upper()
                    error.args = (f"{name}: {error}",)
            raise


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


def precision_name(name: str) -> str:
    """Parameter type of a precision: the name as `precisions()` lists it."""
    from storage_formats.codecs import ALIASES

    return ALIASES.get(name, name)


POSITIVE = click.IntRange(min=1)
index_argument = click.argument("index", type=location)
local_index_argument = click.argument("index", type=PATH)
out_index_option = click.option(
    "--out", required=True, type=LOCAL_INDEX, help="Directory of the new index."
)
DTYPE = click.Choice(["auto", "float32", "bfloat16"])


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
model_option = click.option(
    "--model",
    type=PATH,
    help="Directory of the model bundle.  [default: the bundle that built INDEX]",
)
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Device that runs the model. auto uses cuda if a CUDA device is available.",
)
dtype_option = click.option(
    "--dtype",
    type=DTYPE,
    default="auto",
    help="""Data type of the joint encoder's matrix products. bfloat16 is faster than
    float32 only on processors with bfloat16 instructions. auto is bfloat16 on these
    and on cuda if the model bundle says that recall stays the same, else float32.""",
)
read_precision_option = click.option(
    "--precision",
    type=precision_name,
    metavar="NAME",
    help="Precision of the tokens to read.  [default: the highest fidelity stored]",
)
where_option = click.option(
    "--where",
    metavar="FILTER",
    help="""Select rows by a filter, for example "width > 800 and licence = 'cc0'".
    'info' lists the columns.""",
)
stored_precisions_option = click.option(
    "--precision",
    "precisions",
    type=precision_name,
    metavar="NAME",
    multiple=True,
    default=["bf16"],
    help="Precision of the stored tokens; repeatable.",
)
shard_size_option = click.option(
    "--shard-size",
    type=POSITIVE,
    help="Number of rows per shard.  [default: 1024; more from 2 million rows on]",
)

engine_option = click.option(
    "--engine",
    type=click.Choice(["ray", "inline"]),
    default="ray",
    help="Execution engine: this process (inline) or Ray workers (ray).",
)
address_option = click.option(
    "--address",
    metavar="HOST:PORT",
    help="Ray cluster to join.  [default: start Ray on this machine]",
)
column_option = click.option(
    "--column",
    metavar="NAME",
    help="""Column with the images or image paths, if SOURCE is a table.  [default: a
    column of images, or the first of path, image, file, uri, ...]""",
)
max_failed_option = click.option(
    "--max-failed",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="""Stop if more than this share of the images fails.  [default: 0.01, but 20
    images may always fail]""",
)

images_option = click.option(
    "--images",
    type=PATH,
    help="Base directory of relative image paths.  [default: directory of CAPTIONS]",
)


_PARTS = ", ".join(
    f"{part} ({name})" if part != LOGIT else "logit (joint encoder)"
    for part, name in PART_NAMES.items()
)

score_option = click.option(
    "--score",
    default=BUNDLE_SCORE,
    metavar="SCORE",
    help=(
        "Final score that sorts the hits: 'bundle' (weighted sum with the weights of"
        " the model bundle), or PART=WEIGHT,... (your own weights). A PART without"
        f" WEIGHT has weight 1. The parts are {_PARTS}."
    ),
)
