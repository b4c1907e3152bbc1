"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "advice", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of what was checked, for example "memory".
        result: one sentence about the result.
        level: "ok"; "advice" if something could work better; "problem" if something prevents use.
        advice: what to do; empty if the level is "ok".
        values: the checked or measured values by name, with their unit in the name.
    """

    check: str
    result: str
    level: Level = "ok"
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def judged(check: str, result: str, advice: str, *, level: Level = "advice", values: dict[str, Any]) -> Finding:
    """Return a finding of `level` with `advice`. If `advice` is empty, the level is "ok"."""
    return Finding(check, result, level if advice else "ok", advice, values)
