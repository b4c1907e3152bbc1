"""Options of `train`, made from the configuration's own leaves, and the TOML file that may hold them all."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from edje_index.training.config import TrainConfig, leaves, make_config
from pipelines.jobs.train_request import TrainRequest
from storage_formats.errors import UsageError

Command = Callable[..., Any]
DEVICES = ("auto", "cpu", "cuda")
_KINDS = {Path: "a path", str: "a text", int: "a whole number", bool: "true or false"}
_PATHS = ("out", "images", "model", "language", "features", "view_features", "init", "teacher",
          "teacher_features", "miner", "miner_features", "dev", "run_dir")  # fmt: skip


def config_options(command: Command) -> Command:
    """Give a command one option for every leaf of `TrainConfig`; an option that is not given is None."""
    for name, (_, leaf, kind) in reversed(leaves().items()):
        optional = leaf.default is None
        shown = leaf.metadata["help"]
        if not optional:
            shown += (
                f"  [default: {leaf.default:g}]" if isinstance(leaf.default, float) else f"  [default: {leaf.default}]"
            )
        command = click.option(f"--{name.replace('_', '-')}", name, type=_type(leaf, kind), help=shown)(command)
    return command


def read_request(options: dict[str, Any], config_file: Path | None) -> tuple[TrainRequest, TrainConfig]:
    """Request and configuration from the command line and the file; what the command line says wins.

    In the file the names are those of the options with "_" for "-"; those of the configuration may lie in tables named
    as its groups. Paths in the file are relative to its folder.

    Raises:
        UsageError: an unknown name, a value that cannot be, or something missing.
    """
    values = _read_toml(config_file) if config_file else {}
    values.update({name: value for name, value in options.items() if _is_given(value)})
    known = {field.name for field in fields(TrainRequest)}
    request = {name: values.pop(name) for name in list(values) if name in known}
    config = make_config(values)
    _check_request(request)
    if not request.get("captions") or "out" not in request:
        raise UsageError("give at least one file of CAPTIONS, and --out")
    if (request.get("model") is None) == (request.get("vision") is None):
        raise UsageError(
            "give the frozen towers with --model BUNDLE or with --vision NAME (one of them); "
            "'edje-index train-embedding' makes towers where no CLIP is at hand"
        )
    return TrainRequest(**{**request, "captions": tuple(request["captions"])}), config


def _check_request(values: dict[str, Any]) -> None:
    """UsageError for a value that the command line would not take: files are not checked by click."""
    kinds = get_type_hints(TrainRequest)
    for name, value in values.items():
        if name == "captions" or value is None:
            continue
        kind = next(kind for kind in (*get_args(kinds[name]), kinds[name]) if kind is not type(None))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UsageError(f"'{name}' takes {_KINDS[kind]}, got {value!r}")
        if kind is int and value < 1:
            raise UsageError(f"'{name}' must be at least 1, got {value}")
    if values.get("device", "auto") not in DEVICES:
        raise UsageError(f"'device' is one of {', '.join(DEVICES)}, got {values['device']!r}")


def _is_given(value: Any) -> bool:
    """Whether an option was on the command line; 0 is a value."""
    return value is not None and value is not False and value != ()


def _type(leaf: Any, kind: Any) -> Any:
    if leaf.metadata["choices"] is not None:
        return click.Choice(list(leaf.metadata["choices"]))
    return int if kind is int or int in getattr(kind, "__args__", ()) else float


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    groups = {field.name for field in fields(TrainConfig)}
    values: dict[str, Any] = {}
    for name, value in content.items():
        values.update(_group(path, name, value) if name in groups and isinstance(value, dict) else {name: value})
    known = leaves().keys() | {field.name for field in fields(TrainRequest)}
    if unknown := sorted(values.keys() - known):
        raise UsageError(f"{path} sets what is no setting: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return {name: _located(path.parent, name, value) for name, value in values.items()}


def _group(path: Path, group: str, values: dict[str, Any]) -> dict[str, Any]:
    if strangers := sorted(name for name in values if leaves().get(name, ("",))[0] != group):
        raise UsageError(f"{path} sets in [{group}] what does not belong there: {', '.join(strangers)}")
    return values


def _located(folder: Path, name: str, value: Any) -> Any:
    if name == "captions":
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str) for part in parts):
            raise UsageError(f"'captions' takes paths of files, got {value!r}")
        return [folder / part for part in parts]
    return folder / value if name in _PATHS and isinstance(value, str) else value
