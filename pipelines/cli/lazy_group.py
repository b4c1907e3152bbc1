"""Command groups that import each command only when it is used."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click

Sections = Mapping[str, Mapping[str, str]]
"""Maps each heading of the help text to the commands below it. The inner mapping gives,
for the name of each command, the module and the attribute that define the command, in
the form "module:attribute".
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
        self._listed = {
            name: target
            for section in sections.values()
            for name, target in section.items()
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._listed)

    def get_command(
        self,
        ctx: click.Context,
        cmd_name: str,
    ) -> click.Command | None:
        target = self._listed.get(cmd_name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self,
        ctx: click.Context,
        args: list[str],
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        nearest = difflib.get_close_matches(name, self._listed, 1)
        # During shell completion, when click sets `resilient_parsing`, the name may be
        # incomplete. An unknown name is then no error.
        if nearest and name not in self._listed and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{name}'. Did you mean '{nearest[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,
        formatter: click.HelpFormatter,
    ) -> None:
        column = max(map(len, self._listed))
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
