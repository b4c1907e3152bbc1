"""The group of commands, and what becomes of errors: one line, an exit code, never a traceback."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence

import click

from edje_index import __version__
from edje_index.errors import missing_extra
from pipelines.engines.base import describe_error
from storage_formats.errors import EdjeError, UsageError

COMMANDS = {
    "build": "pipelines.cli.build:build",
    "info": "pipelines.cli.info:info",
    "verify": "pipelines.cli.verify:verify",
    "quantize": "pipelines.cli.quantize:quantize",
    "search": "pipelines.cli.search:search",
    "eval": "pipelines.cli.eval_command:evaluate",
    "train": "pipelines.cli.train:train",
    "init-model": "pipelines.cli.init_model:init_model",
    "import-checkpoint": "pipelines.cli.import_checkpoint:import_checkpoint",
    "train-embedding": "pipelines.cli.train_embedding:train_embedding",
    "fetch-towers": "pipelines.cli.fetch_towers:fetch_towers",
    "carry-model": "pipelines.cli.pack_model:carry_model",
    "unpack-model": "pipelines.cli.pack_model:unpack_model",
    "bench": "benchmarks.cli:bench",
}
"""Name of each command, in the order of the help text, and where it is."""


class LazyGroup(click.Group):
    """A group that imports a command's module when the command, or its help, is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"edje-index {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Index image collections for EDJE re-ranking: visual tokens in a sharded store, embeddings in FAISS.

    \b
    First steps:
      edje-index init-model model             a model bundle of random weights, to try things out
      edje-index build photos --out photos.edje --model model
      edje-index search photos.edje "a dog on a beach"

    Results go to standard output, everything else to standard error. Exit codes: 0 fine, 1 problems found or
    work failed, 2 wrong usage.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = cli.main(arguments, prog_name="edje-index", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # the reader of a pipe has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as raised:
        command = next((argument for argument in arguments if not argument.startswith("-")), "")
        error = missing_extra(raised, preferred=command) or raised
        code, message = _explain(error)
        _report(error, message, code, as_json="--json" in arguments)
        return code


def _explain(error: BaseException) -> tuple[int, str]:
    """Exit code and message of whatever ended a command."""
    if isinstance(error, click.ClickException):
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f" (see '{error.ctx.command_path} --help')"
        return UsageError.exit_code, error.format_message().rstrip(".") + hint
    if isinstance(error, EdjeError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return 1, "interrupted"
    if isinstance(error, SystemExit):
        return (error.code, "") if isinstance(error.code, int) else (1, str(error.code or ""))
    if isinstance(error, OSError) and error.strerror:
        return 1, describe_error(error)
    return 1, f"unexpected {describe_error(error)}; run again with EDJE_DEBUG=1 to see where"


def _report(error: BaseException, message: str, code: int, *, as_json: bool) -> None:
    if os.environ.get("EDJE_DEBUG"):
        traceback.print_exception(error)
    if as_json:
        click.echo(json.dumps({"error": message, "exit_code": code}))
    click.echo(f"error: {message}", err=True)
