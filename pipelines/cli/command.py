"""Makes commands of the functions that do their work: the signature of a function gives
the arguments and options of its command, and its docstring gives their help.

The source of the function is parsed, and the function is imported only when the command
runs. So help and wrong usage need none of the libraries that the function imports.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipelines.cli.output import JSON, QUIET, print_result, run_job
from storage_formats.errors import EdjeError, UsageError
from storage_formats.remote.urls import index_location, local_path

_COMMON = "pipelines.jobs.build:build_index"
"""The function whose docstring describes the parameters that other docstrings leave
out.
"""
# Parameters that are no arguments or options.
_NOT_GIVEN = ("job", "on_event", "on_progress", "should_stop", "say")


class _LocalPath(click.Path):
    """Parameter type of paths on this machine. A URL is refused, because otherwise it
    would be taken for a path inside a directory such as `s3:`.
    """

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        try:
            local_path(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


def _precision(name: str) -> str:
    """Parameter type of a precision: the name as `precisions()` lists it."""
    from storage_formats.codecs import ALIASES

    return ALIASES.get(name, name)


PATH = _LocalPath(path_type=Path)
location = click.types.FuncParamType(index_location)
"""Parameter type of an index. The URL of an index stays a string, and any other
argument becomes a `Path`.
"""
location.name = "path"
# Types of values by the name of the type of the parameter. All other values are texts.
_TYPES = {"int": int, "float": float, "Path": PATH, "IndexLocation": location}
# Settings of click for parameters of these names, which the signature cannot express.
_PRECISION = {"metavar": "NAME", "type": _precision}
_SETTINGS: dict[str, dict[str, Any]] = {
    "address": {"metavar": "HOST:PORT"},
    "assignments": {"metavar": "GROUP.KEY=VALUE"},
    "device": {"type": click.Choice(["auto", "cpu", "cuda"])},
    "drop": _PRECISION,
    "dtype": {"type": click.Choice(["auto", "float32", "bfloat16"])},
    "exclude": {"metavar": "PATTERN"},
    "include": {"metavar": "PATTERN"},
    "indexes": {"metavar": "INDEX..."},
    "max_failed": {"metavar": "SHARE"},
    "max_vanished": {"metavar": "SHARE"},
    "precision": _PRECISION,
    "precisions": _PRECISION,
    "source": _PRECISION,
    "to": _PRECISION,
    "sources": {"metavar": "SOURCE...", "type": str},
    "where": {"metavar": "FILTER"},
}
# Matches a parameter in the section "Args:" of a docstring, and its description.
_DESCRIBED = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
# Matches the part of a description that says what None means.
_MEANING_OF_NONE = re.compile(r"[;.] None (?:selects|is|for) (.+?)\.(?= |$)")


def _common_option(option: str, description: str) -> click.Option:
    """Return a flag whose value `pipelines.cli.output.is_given` returns."""

    def remember(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            context.meta[option] = True

    return click.Option(
        [option],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=remember,
        help=description,
    )


COMMON_OPTIONS = [
    _common_option(JSON, "Print one JSON object on standard output."),
    _common_option(QUIET, "Show no progress."),
]
"""Options that every command has, as it has --help."""


class Job:
    """The function that a command runs.

    Attributes:
        given: values of the parameters of the function, without those that have neither
            a value nor a default.
        result: what the command prints with --json: the result of the function, unless
            the command sets another object.
        exit_code: exit code of the command.
    """

    def __init__(self, target: str, given: dict[str, Any], *, resume: bool) -> None:
        self.given = given
        self.result: Any = None
        self.exit_code = 0
        self._target = target
        self._resume = resume

    def run(self, **changes: Any) -> Any:
        """Call the function with the values in `given` and `changes`, and return its
        result.
        """
        module, _, name = self._target.partition(":")
        self.result = run_job(
            getattr(importlib.import_module(module), name),
            resume=self._resume,
            **{**self.given, **changes},
        )
        return self.result


def command(
    target: str = "",
    *,
    name: str | None = None,
    resume: bool = False,
    **flags: str | None,
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a command of a function, whose docstring is the
    help of the command.

    Args:
        target: function that the command runs, as "module:function". The decorated
            function gets the `Job`, and may run it and yield the lines to print. If it
            does not run the job, the command does. If it yields no lines, the result
            is printed. Its own keyword-only parameters are further options. If `target`
            is empty, the decorated function does everything itself, and may return an
            exit code.
        name: name of the command. None selects the name of the decorated function.
        resume: True if the same command resumes a stopped job.
        flags: for each parameter whose option does not have its name, the option; None
            for a parameter that the command does not have. Parameters that are not
            keyword-only are arguments, unless an option is given for them.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        def run(**values: Any) -> Any:
            given = {name: value for name, value in values.items() if value is not None}
            if not target:
                return function(**given)
            names = inspect.signature(function).parameters
            own = {name: given.pop(name) for name in names if name in given}
            job = Job(target, given, resume=resume)
            lines = list(function(job, **own) or ())
            if job.result is None:
                job.run()
            print_result(job.result, lines)
            return job.exit_code

        text, _, _ = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")
        return Command(
            name or function.__name__.replace("_", "-"),
            callback=run,
            help=text,
            targets=[
                *filter(None, [target]),
                f"{function.__module__}:{function.__name__}",
            ],
            flags=flags,
        )

    return decorate


class Command(click.Command):
    """A command whose arguments and options are read from the source of a function when
    they are first needed.

    Args:
        targets: functions, as "module:function". All give parameters, and each is
            described by the first docstring that does so.
        flags: see `command`.
    """

    def __init__(
        self,
        *arguments: Any,
        targets: list[str],
        flags: dict[str, str | None],
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self._targets = targets
        self._flags = flags
        # Now the property below gives the parameters.
        del self.params

    @functools.cached_property
    def params(self) -> list[click.Parameter]:  # type: ignore[override]
        rows = []
        for target in self._targets:
            arguments = _function(target).args
            names = [*arguments.args, *arguments.kwonlyargs]
            defaults = [*arguments.defaults, *arguments.kw_defaults]
            required = [None] * (len(names) - len(defaults))
            for each, default in zip(names, [*required, *defaults], strict=True):
                name = each.arg
                flag = self._flags.get(name, f"--{name}".replace("_", "-"))
                if name in _NOT_GIVEN or flag is None:
                    continue
                if each in arguments.args and name not in self._flags:
                    flag = name.upper()
                rows.append((each, default, flag))
                self._flags[name] = flag
        return [self._parameter(*row) for row in rows]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, the options of all commands, and --help."""
        *parameters, usage = super().get_params(ctx)
        return [*parameters, *COMMON_OPTIONS, usage]

    def _parameter(
        self,
        argument: ast.arg,
        default: ast.expr | None,
        flag: str,
    ) -> click.Parameter:
        """Return the click parameter for a parameter of the function.

        Args:
            default: None if the parameter has no default.
            flag: the option, or the name of the argument in capital letters.
        """
        name = argument.arg
        assert argument.annotation is not None
        annotation = ast.unparse(argument.annotation)
        kinds = re.findall(r"\w+", annotation)
        is_required = default is None and "None" not in kinds
        settings: dict[str, Any] = {"required": is_required}
        for kind in filter(_TYPES.__contains__, kinds):
            settings["type"] = _TYPES[kind]
        if "Literal" in kinds:
            settings["type"] = click.Choice(re.findall("'(.+?)'", annotation))
        # A default that is no literal is left to the function.
        with contextlib.suppress(ValueError):
            if default is not None and (value := ast.literal_eval(default)):
                settings["default"] = value
        settings |= _SETTINGS.get(name, {})
        is_repeated = "Sequence" in kinds
        if not flag.startswith("-"):
            return click.Argument([name], nargs=-1 if is_repeated else 1, **settings)
        settings = {"multiple": is_repeated, **settings}
        if "bool" in kinds:
            settings["is_flag"] = True
        flag = flag if len(name) > 1 else f"-{name}"
        return click.Option([flag, name], help=self._help(name), **settings)

    def _help(self, name: str) -> str:
        """Return the help of the option for the parameter `name`: its description in a
        docstring, with names of parameters replaced by those of options and arguments.
        """
        for target in (*self._targets, _COMMON):
            described = _described(target)
            if name in described:
                break
        text = " ".join(described[name].split()).removeprefix("True to ")
        meanings = _MEANING_OF_NONE.findall(text)
        text = _MEANING_OF_NONE.sub(".", text)
        text += "".join(f"  [default: {meaning}]" for meaning in meanings)
        text = re.sub(
            r"`(\w+)`", lambda match: self._flags.get(match[1]) or match[0], text
        )
        return (text[0].upper() + text[1:]).replace("`", "")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. If an EdjeError names a parameter, put the name that this
        option or argument has on the command line in front of the error message.
        """
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


@functools.cache
def _function(target: str) -> ast.FunctionDef:
    """Return the parsed definition of `target`, a function "module:function"."""
    module, _, name = target.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    for node in ast.parse(Path(str(spec.origin)).read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(target)


def _described(target: str) -> dict[str, str]:
    """Return the descriptions of the parameters of a function, by name."""
    return dict(_DESCRIBED.findall(ast.get_docstring(_function(target)) or ""))
