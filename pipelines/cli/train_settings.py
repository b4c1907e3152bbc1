"""Reads the settings of `train` from a preset, a TOML file, `--set` and other options."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from edje_index.training.config import ONLINE, TrainSettings, Values, groups, merge_settings
from storage_formats.errors import UsageError
from storage_formats.format.index_files import open_regular

DEDICATED_OPTIONS = {
    "captions": "inputs.captions",
    "images": "inputs.images",
    "dev": "inputs.dev",
    "model": "inputs.model",
    "vision": "inputs.vision",
    "language": "inputs.language",
    "init": "inputs.init",
    "features": "inputs.features",
    "out": "run.out",
    "workers": "run.workers",
    "device": "run.device",
    "steps": "loop.steps",
    "epochs": "loop.epochs",
}
"""The setting that each option or argument of `train` changes."""


def read_settings(
    preset: str, config_file: Path | None, assignments: Iterable[str], options: Mapping[str, Any]
) -> Values:
    """Merge the settings of the preset, `config_file`, `assignments` and `options`, in this order.

    Later values override earlier values. The result maps each group to its settings.

    Args:
        preset: name of a preset.
        config_file: TOML file with one table per group. Relative paths are relative to the directory of the file.
        assignments: texts of the form `group.key=value`, where the value is TOML, a bare word or `none`.
        options: values of the other command-line options by name; None and empty values are ignored.

    Raises:
        UsageError: `config_file` or an assignment cannot be read. The values are not validated.
    """
    assigned: Values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        group, dot, key = name.strip().partition(".")
        if not (equals and group and dot and key):
            raise UsageError(f"--set {assignment}: write GROUP.KEY=VALUE, for example --set optimizer.lr=1e-3")
        assigned.setdefault(group, {})[key] = _parse_value(text.strip())
    given: Values = {}
    for option, value in options.items():
        if value is not None and value != ():
            group, _, key = DEDICATED_OPTIONS[option].partition(".")
            given.setdefault(group, {})[key] = value
    return merge_settings(preset, {} if config_file is None else _read_toml(config_file), assigned, given)


def _parse_value(text: str) -> Any:
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _read_toml(path: Path) -> Values:
    try:
        with os.fdopen(open_regular(path), encoding="utf-8") as file:
            content = tomllib.loads(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}; give a TOML file") from error
    if loose := [key for key, value in content.items() if not isinstance(value, dict)]:
        raise UsageError(
            f"{path}: {', '.join(loose)} must be in a group, such as [loop]; --show-settings lists all groups"
        )
    for group, kind in groups(TrainSettings).items():
        for key, value in content.get(group, {}).items():
            if key in kind.model_fields and "Path" in str(kind.model_fields[key].annotation):
                content[group][key] = _located(path.parent, value)
    return content


def _located(folder: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_located(folder, part) for part in value]
    return folder / value if isinstance(value, str) and value != ONLINE else value


def describe_settings(values: Values) -> str:
    """Return a TOML settings file with all settings and their descriptions."""
    lines = ["# Settings of edje-index train. Save them to a file for --config. A setting that is not set is None."]
    for group, kind in groups(TrainSettings).items():
        lines += ["", f"# {str(kind.__doc__).splitlines()[0]}", f"[{group}]"]
        for key, setting in kind.model_fields.items():
            default = None if setting.is_required() else setting.default
            value = values.get(group, {}).get(key, default)
            shown = "required" if setting.is_required() else "not set" if default is None else _toml(default)
            names = [choice for choice in get_args(setting.annotation) if isinstance(choice, str)]
            choices = f" One of {', '.join(names)}." if names else ""
            description = " ".join(str(setting.description).split())
            lines.append(f"# {description}{choices}  [default: {shown}]")
            lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml(value)}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))
