"""Reads the settings of `train` from a preset, a TOML file, `--set` and other options."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from edje_index.training.config import Settings, TrainConfig, groups, setting_names, validated
from edje_index.training.presets import PRESETS
from pipelines.jobs.training.request import ONLINE, TrainRequest
from storage_formats.errors import UsageError

DEDICATED_OPTIONS = {
    "captions": "inputs.captions",
    "images": "inputs.images",
    "dev": "inputs.dev",
    "model": "inputs.model",
    "vision": "inputs.vision",
    "language": "inputs.language",
    "init": "inputs.init",
    "features": "inputs.features",
    "teacher": "inputs.teacher",
    "out": "run.out",
    "run_dir": "run.dir",
    "workers": "run.workers",
    "device": "run.device",
    "steps": "loop.steps",
    "epochs": "loop.epochs",
}
"""The setting that each option or argument of `train` changes."""

# Options of earlier versions whose names differ from the key of their setting.
_RENAMED_OPTIONS = {
    "align-steps": "alignment.steps",
    "align-batch-size": "alignment.batch_size",
    "align-captions": "alignment.captions",
    "align-start": "alignment.adapter_init",
    "align-lr": "alignment.lr",
    "negatives": "negatives.count",
    "negatives-temperature": "negatives.temperature",
    "negatives-curriculum": "negatives.curriculum_steps",
    "words": "architecture.word_embeddings",
    "bank": "fitting.hubness_bank",
    "export": "run.export",
}
Values = dict[str, dict[str, Any]]


class TrainSettings(TrainConfig, TrainRequest):
    """All settings of one training run. Settings files and the command line use the same names."""


def read_settings(
    preset: str, config_file: Path | None, assignments: Iterable[str], options: Mapping[str, Any]
) -> Values:
    """Merge the settings of the preset, `config_file`, `assignments` and `options`, in this order.

    Later values override earlier values. The result maps each group to its settings.

    Args:
        preset: name of a preset.
        config_file: TOML file with one table per group. Relative paths are relative to the directory of the file.
        assignments: texts of the form `group.key=value`, where the value is TOML, a bare word or `none`.
        options: values of the other command-line options by name; None, False and empty values are ignored.

    Raises:
        UsageError: `config_file` or an assignment cannot be read. `make_request` validates the values.
    """
    given = {DEDICATED_OPTIONS[name]: value for name, value in options.items() if _is_given(value)}
    sources = [
        PRESETS[preset],
        {} if config_file is None else _read_toml(config_file),
        _grouped(map(_parse_assignment, assignments)),
        _grouped(given.items()),
    ]
    merged: Values = {}
    for source in sources:
        for group, values in source.items():
            merged.setdefault(group, {}).update(values)
        for length, other in (("steps", "epochs"), ("epochs", "steps")):
            if length in source.get("loop", {}) and other not in source["loop"]:
                merged["loop"].pop(other, None)  # for example epochs of an option instead of the steps of a preset
    return merged


def _is_given(value: Any) -> bool:
    """Return False if `value` means that an option was not given: None, False or an empty tuple."""
    return value is not None and value is not False and value != ()


def _grouped(settings: Iterable[tuple[str, Any]]) -> Values:
    values: Values = {}
    for name, value in settings:
        group, _, key = name.partition(".")
        values.setdefault(group, {})[key] = value
    return values


def make_request(values: Values) -> tuple[TrainRequest, TrainConfig]:
    """Validate merged settings. Return the request and the configuration of the training run.

    Raises:
        UsageError: a setting is invalid; the message has one line per problem.
    """
    settings = validated(TrainSettings, {"inputs": {}, "run": {}, **values})
    request = TrainRequest(inputs=settings.inputs, run=settings.run)
    return request, TrainConfig(**{group: getattr(settings, group) for group in groups(TrainConfig)})


def describe_settings(values: Values) -> str:
    """Return a TOML settings file with all settings and their descriptions."""
    lines = ["# Settings of edje-index train. Save them to a file for --config. A setting that is not set is None."]
    for group, kind in groups(TrainSettings).items():
        lines += ["", f"# {str(kind.__doc__).splitlines()[0]}", f"[{group}]"]
        for key, field in kind.model_fields.items():
            default = None if field.is_required() else field.default
            value = values.get(group, {}).get(key, default)
            shown = "required" if field.is_required() else "not set" if default is None else _toml(default)
            lines.append(f"# {field.description}{_choices(field.annotation)}  [default: {shown}]")
            lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml(value)}")
    return "\n".join(lines)


def settings_json(values: Values) -> dict[str, Any]:
    """Return all settings by group and key, each with value, default and description."""
    listing: dict[str, Any] = {}
    for group, kind in groups(TrainSettings).items():
        for key, field in kind.model_fields.items():
            default = None if field.is_required() else field.default
            value = values.get(group, {}).get(key, default)
            listing.setdefault(group, {})[key] = {
                "value": json.loads(json.dumps(value, default=str)),
                "default": default,
                "required": field.is_required(),
                "description": field.description,
            }
    return listing


def removed_options(arguments: Sequence[str]) -> list[str]:
    """Return one line for each removed option in `arguments`. The line names the replacement of the option."""
    lines = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and (replacement := _replacement(option)):
            shown = value if equals else "VALUE" if following.startswith("--") else following
            setting = replacement if replacement.startswith("--") else f"--set {replacement}={shown}"
            lines.append(f"--{option} is not an option; write {setting}")
    return lines


@contextlib.contextmanager
def options_named() -> Iterator[None]:
    """Context manager that adds option names to the message of a UsageError, for example "loop.steps (--steps)"."""
    try:
        yield
    except UsageError as error:
        flags = {name: f"--{option.replace('_', '-')}" for option, name in DEDICATED_OPTIONS.items()}
        flags["inputs.captions"] = "CAPTIONS"
        names = "|".join(map(re.escape, flags))
        message = re.sub(rf"\b({names})\b", lambda match: f"{match[1]} ({flags[match[1]]})", str(error))
        raise UsageError(message) from error


def _replacement(option: str) -> str | None:
    """Return the replacement of a removed option, or None if `option` is not a removed option."""
    key = option.replace("-", "_")
    if key in DEDICATED_OPTIONS:
        return None
    if option == "phase":
        return "--preset paper or --preset paper-finetune"
    if option in _RENAMED_OPTIONS:
        return _RENAMED_OPTIONS[option]
    names = [name for name in setting_names(TrainSettings) if not name.startswith(("alignment.", "negatives."))]
    return next((name for name in names if name.partition(".")[2] == key), None)


def _read_toml(path: Path) -> Values:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}; give a TOML file") from error
    if loose := [key for key, value in content.items() if not isinstance(value, dict)]:
        raise UsageError(
            f"{path}: {', '.join(loose)} must be in a group, such as [loop]; --show-settings lists all groups"
        )
    for group, kind in groups(TrainSettings).items():
        for key, value in content.get(group, {}).items():
            if key in kind.model_fields and _holds_path(kind, key):
                content[group][key] = _located(path.parent, value)
    return content


def _holds_path(kind: type[Settings], key: str) -> bool:
    return "Path" in str(kind.model_fields[key].annotation)


def _located(folder: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_located(folder, part) for part in value]
    return folder / value if isinstance(value, str) and value != ONLINE else value


def _parse_assignment(assignment: str) -> tuple[str, Any]:
    name, equals, text = assignment.partition("=")
    group, dot, key = name.strip().partition(".")
    if not (equals and group and dot and key):
        raise UsageError(f"--set {assignment}: write GROUP.KEY=VALUE, for example --set optimizer.lr=1e-3")
    return f"{group}.{key}", _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _choices(annotation: Any) -> str:
    choices = [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return f" One of {', '.join(choices)}." if choices else ""


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))
