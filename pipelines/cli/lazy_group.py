"""Command groups that import each command only when it is used."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click

Sections = Mapping[str, Mapping[str, str]]
"""Maps each heading of the help text to the commands below it. The inner mapping gives
the module that defines each command.
"""


class LazyGroup(click.Group):
    """A group that imports the module of a command only when the command or its
    help is needed.
    """

    def __init__(
        self,
        *,
        sections: Sections,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._sections = sections
        self._modules = {
            name: module
            for section in sections.values()
            for name, module in section.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(
        self,
        ctx: click.Context,
        cmd_name: str,
    ) -> click.Command | None:
        module = self._modules.get(cmd_name)
        if module is None:
            return None
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, click.Command) and value.name == cmd_name:
                return value
        raise LookupError(cmd_name)

    def resolve_command(
        self,
        ctx: click.Context,
        args: list[str],
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        nearest = difflib.get_close_matches(name, self._modules, 1)
        # During shell completion, when click sets `resilient_parsing`, the name may be
        # incomplete. An unknown name is then no error.
        if nearest and name not in self._modules and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{name}'. Did you mean '{nearest[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,
        formatter: click.HelpFormatter,
    ) -> None:
        column = max(map(len, self._modules))
        # Width of the short help texts. As in click's own method, 6 characters of the
        # line are left free for indentation and for the space before the text.
        width = formatter.width - 6 - column
        for heading, section in self._sections.items():
            rows = []
            for name in section:
                command = self.get_command(ctx, name)
                assert command is not None
                rows.append((name.ljust(column), command.get_short_help_str(width)))
            with formatter.section(heading):
                formatter.write_dl(rows)
