"""The `edje-index` command line: lists the commands, and turns errors into messages
and exit codes.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click
from click.shell_completion import shell_complete

from edje_index import __version__
from pipelines.cli.command import COMMON_OPTIONS
from pipelines.cli.output import (
    LOG_KEY,
    open_standard_streams,
    print_json,
    wants_json,
)
from pipelines.collector import own_process
from pipelines.engines.base import describe_error
from pipelines.progress.events import INTERRUPTED
from pipelines.progress.wording import printable
from storage_formats.errors import EdjeError, UsageError
from storage_formats.extras import missing_extra

_PROGRAM = "edje-index"
# environment variable that click's scripts for shell completion set
_COMPLETION = "_EDJE_INDEX_COMPLETE"
# What the user can do about an error of the operating system. The text is appended to
# the message.
_ADVICE = {
    errno.EROFS: "; give a place on a disk that can be written",
    errno.ENOSPC: "; free some space, or give a place on another disk",
    errno.EACCES: "; check the permissions, or give another place",
}
# What the user can do about an EdjeError, by the value of its attribute `remedy`. The
# texts are here because libraries do not know the names of commands and options.
_REMEDIES = {
    "bundle": (
        "; 'edje-index model get --out DIR' writes a small trained model, and 'model"
        " get NAME:TAG --out DIR' an open_clip model"
    ),
    "model": " with --model",
    "rebuild": ": 'edje-index build PHOTOS --out NEW --model MODEL'",
    "features": "; build an index with a bundle that 'edje-index model features' makes",
    "precision": "; 'edje-index quantize INDEX --to NAME' adds a precision",
    "new-column": "; to add the column, give --new-column",
    "inline": "; '--engine inline' works without Ray",
    "demo": (
        "; the demo model needs no Hub: 'edje-index show FOLDER', or 'edje-index model"
        " get'"
    ),
    "ann": "; build it with 'edje-index ann build'",
    "discard": "; 'edje-index gc INDEX' does this, and keeps the committed rows",
    "snapshots": " with 'edje-index gc INDEX --keep 1'",
    "append": ", or append the rows to this index with --append",
    "embedding": ", with --score embedding",
    "upgrade": " with 'edje-index upgrade INDEX'",
    "verify": "; run 'edje-index verify' to list all damage",
    "show": (
        "; to search a folder of photos, run 'edje-index show FOLDER', or build an"
        " index with 'edje-index build FOLDER --out INDEX --model MODEL'"
    ),
    "build": (
        "; check the path, or build an index with 'edje-index build FOLDER --out INDEX"
        " --model MODEL'"
    ),
}
# exit code of a program that the signal SIGPIPE ends
_BROKEN_PIPE = 128 + signal.SIGPIPE

_MODULES = {
    "Build": {"pipelines.cli.build": "build append update import-arrays"},
    "Change": {
        "pipelines.cli.changes": (
            "delete edit compact merge copy quantize ann history rollback gc upgrade"
        )
    },
    "Check": {
        "pipelines.cli.info": "info failures",
        "pipelines.cli.changes": "verify repair",
    },
    "Search": {
        "pipelines.cli.search": "search explain eval",
        "pipelines.cli.serve": "serve show",
    },
    "Model": {"pipelines.cli.bundles": "model", "pipelines.cli.train": "train"},
    "Bench": {"benchmarks.cli": "bench"},
}
SECTIONS = {
    heading: {name: module for module in modules for name in modules[module].split()}
    for heading, modules in _MODULES.items()
}
"""Commands by heading, in the order of the help text, with the module that defines each
command.
"""

_MODULE_OF: dict[str, Any] = {
    name: module for section in SECTIONS.values() for name, module in section.items()
}


class LazyGroup(click.Group):
    """A group that imports the module of a command only when the command or its
    help is needed.
    """

    def __init__(self, **settings: Any) -> None:
        # click reads only the names of the commands, for its suggestions.
        super().__init__(commands=dict(_MODULE_OF), **settings)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULE_OF)

    def get_command(
        self,
        ctx: click.Context,
        cmd_name: str,
    ) -> click.Command | None:
        module = _MODULE_OF.get(cmd_name)
        if module is None:
            return None
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, click.Command) and value.name == cmd_name:
                return value
        raise LookupError(cmd_name)

    def format_commands(
        self,
        ctx: click.Context,
        formatter: click.HelpFormatter,
    ) -> None:
        column = max(map(len, _MODULE_OF))
        # Width of the short help texts. As in click's own method, 6 characters of the
        # line are left free for indentation and for the space before the text.
        width = formatter.width - 6 - column
        for heading, section in SECTIONS.items():
            rows = []
            for name in section:
                command = self.get_command(ctx, name)
                assert command is not None
                rows.append((name.ljust(column), command.get_short_help_str(width)))
            with formatter.section(heading):
                formatter.write_dl(rows)


def _print_version(
    ctx: click.Context,
    _option: click.Parameter,
    requested: bool,
) -> None:
    if not requested:
        return
    if wants_json():
        from pipelines.environment import dependencies, environment
        from storage_formats.reading import engines
        from storage_formats.threads import has_bfloat16

        machine = {
            **environment(),
            "bfloat16": has_bfloat16(),
            "read_engines": list(engines()),
        }
        print_json({**machine, "version": __version__, "versions": dependencies()})
    else:
        click.echo(f"edje-index {__version__}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    expose_value=False,
    callback=lambda context, _, path: context.meta.update({LOG_KEY: path}),
    help=(
        "Append the events of the command to FILE, one JSON object per line: --log"
        " build.jsonl build photos ..."
    ),
)
def cli() -> None:
    """Index image collections for EDJE re-ranking: visual tokens in a sharded store,
    embeddings in FAISS.

    \b
    First steps:
      edje-index show photos                  search a folder of photos in the browser
      edje-index model get                    write a small trained model to 'model'
      edje-index build photos --out photos.edje --model model
      edje-index search photos.edje "a dog on a beach"

    Results go to standard output; messages and progress go to standard error. Exit
    codes: 0 success, 1 problems found or command failed, 2 wrong usage, 130 interrupted
    by Ctrl-C. With --version, --json shows the machine and the installed packages, for
    bug reports.
    """


cli.params += COMMON_OPTIONS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: arguments after the name of the program. None means the arguments of
            this process. In that case, `main` also replaces the standard streams and
            the handler of SIGINT, and ends the process after Ctrl-C instead of
            returning.
    """
    if completion := os.environ.get(_COMPLETION):
        return shell_complete(cli, {}, _PROGRAM, _COMPLETION, completion)
    # Received signals. Native code of libraries may turn a KeyboardInterrupt into
    # another error; this list then tells `_run` what happened.
    interrupts: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if is_process := arguments is None:
        arguments = sys.argv[1:]
        open_standard_streams()
        own_process()
        # Shells start background commands of scripts with SIGINT ignored. In that case
        # SIGINT stays ignored.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
    arguments = list(arguments)
    if not arguments or arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    try:
        code = _run(arguments, interrupts)
    except BrokenPipeError:
        return _BROKEN_PIPE
    if code == INTERRUPTED and is_process:
        # A normal exit would first wait for all threads to end. Some of them may be
        # waiting for the response of a server.
        os._exit(code)
    return code


def _run(arguments: list[str], interrupts: Sequence[int]) -> int:
    # `cli.main` is not used, because it turns a broken pipe into a SystemExit that
    # looks like the SystemExit of other errors.
    try:
        with cli.make_context(_PROGRAM, list(arguments)) as context:
            code = cli.invoke(context)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except BrokenPipeError:
        raise
    except BaseException as raised:
        command = next(
            (argument for argument in arguments if argument in _MODULE_OF), ""
        )
        # After Ctrl-C, an error that is not itself reported as an interrupt is only a
        # consequence of the interrupt.
        if interrupts and getattr(raised, "exit_code", None) != INTERRUPTED:
            raised = KeyboardInterrupt()
        error = missing_extra(raised, preferred=command) or raised
        code, message = _explain(error)
        if os.environ.get("EDJE_DEBUG"):
            traceback.print_exception(error)
        # The message of invalid settings has one line per problem. Each line is escaped
        # alone, because `printable` would escape the line breaks.
        lines = map(printable, message.split("\n"))
        click.echo("error: " + "\n".join(lines), err=True)
        if "--json" in arguments:
            print_json({"error": message, "exit_code": code})
        return code


def _explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message for an error that ended a command."""
    if isinstance(error, click.ClickException):
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f" (see '{error.ctx.command_path} --help')"
            # A missing option is described by its help.
            if description := getattr(getattr(error, "param", None), "help", None):
                hint = f": {description}{hint}"
            extra = "unexpected extra argument" in error.format_message()
            if extra and error.ctx.info_name == "search":
                hint = "; put the query in quotes: search INDEX 'a dog on a beach'"
        return UsageError.exit_code, error.format_message().rstrip(".") + hint
    if isinstance(error, EdjeError):
        return error.exit_code, f"{error}{_REMEDIES.get(error.remedy or '', '')}"
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED, "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return 1, describe_error(error) + _ADVICE.get(error.errno or 0, "")
    return (
        1,
        (
            f"unexpected {describe_error(error)}; run again with EDJE_DEBUG=1 to see"
            " the traceback"
        ),
    )
