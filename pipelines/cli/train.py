"""The command `edje-index train`."""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pipelines.cli.command import command
from pipelines.cli.output import print_result, run_job
from storage_formats.errors import UsageError
from storage_formats.format.index_files import open_regular
from storage_formats.remote.urls import IndexLocation

if TYPE_CHECKING:
    from edje_index.training.config import Values


@command(config_file="--config", assignments="--set")
def train(
    index: IndexLocation | None = None,
    *,
    out: Path | None = None,
    dev: IndexLocation | None = None,
    preset: Literal["paper", "paper-finetune", "small-data", "quick"] = "paper",
    config_file: Path | None = None,
    assignments: Sequence[str] = (),
    show_settings: bool = False,
) -> None:
    """Train an adapter and a joint encoder on the captioned images of INDEX, and write
    a model bundle.

    INDEX stores the features of a frozen vision tower: build it with a bundle of 'model
    features', from sources with captions. Run the same command again to resume an
    interrupted training run.

    Settings come from --preset, --config, --set and the other options, in this order;
    later values override earlier values. --show-settings lists all settings.

    \b
    Presets:
      paper           first training phase of the EDJE paper, for millions of images
      paper-finetune  second training phase of the EDJE paper; set inputs.init
      small-data      for thousands of images on a CPU; needs --dev
      quick           to see in minutes that a training runs; set inputs.init

    With thousands of captions, expect late interaction and pooled similarity to
    improve the ranking, but not the joint encoder: the paper used 14 million images.

    \b
    Examples:
      edje-index model features clip features
      edje-index build captions.json --out data.edje --model features
      edje-index train data.edje --set inputs.language=minilm --out model
      edje-index train data.edje --dev dev.edje --preset quick \\
        --set inputs.init=model --out tried
      edje-index train more.edje --preset paper-finetune --set inputs.init=model \\
        --set loop.epochs=5 --out tuned
      edje-index train data.edje --dev dev.edje --set inputs.language=minilm \\
        --preset small-data --out model
      edje-index train data.edje --set inputs.language=minilm \\
        --set architecture.adapter=local --set loop.epochs=5 --out teacher
      edje-index train data.edje --set inputs.init=teacher \\
        --set inputs.teacher=teacher --set loop.epochs=5 --out student
      edje-index train --preset small-data --show-settings > settings.toml

    Args:
        index: index of the images to train on.
        out: directory of the bundle to write.
        dev: index of images that are not in INDEX, built with the same bundle. The
            weights of the final score are fitted to their captions.
        preset: named set of settings to start from.
        config_file: TOML file with settings, which override the preset.
        assignments: value of one setting; overrides --config. Repeatable.
        show_settings: print every setting with its description, as TOML, and exit.
    """
    from edje_index.training.config import validated

    given: Values = {"inputs": {"index": index, "dev": dev}, "run": {"out": out}}
    values = read_settings(preset, config_file, assignments, given)
    if show_settings:
        text = describe_settings(values)
        print_result({"settings": text}, text.splitlines())
        return
    from pipelines.jobs.training.job import run_training

    settings = validated(values)
    result = run_job(run_training, settings, resume=True)
    print_result(result)


def read_settings(
    preset: str,
    config_file: Path | None,
    assignments: Iterable[str],
    given: Mapping[str, Mapping[str, Any]],
) -> Values:
    """Merge the settings of the preset, `config_file`, `assignments` and `given`, in
    this order.

    Later values override earlier values. The result maps each group to its settings.

    Args:
        preset: name of a preset.
        config_file: TOML file with one table per group.
        assignments: texts of the form `group.key=value`, where the value is TOML, a
            bare word or `none`.
        given: values of settings by group and name; None is ignored.

    Raises:
        UsageError: `config_file` or an assignment cannot be read. The values are not
            validated.
    """
    from edje_index.training.config import merge_settings

    assigned: Values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        group, dot, key = name.strip().partition(".")
        if not (equals and group and dot and key):
            raise UsageError(
                f"--set {assignment}: write GROUP.KEY=VALUE, for example --set"
                " optimizer.lr=1e-3"
            )
        value: Any = text.strip()
        with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
            value = tomllib.loads(f"value = {value}")["value"]
        assigned.setdefault(group, {})[key] = None if value == "none" else value
    options = {
        group: {name: value for name, value in values.items() if value is not None}
        for group, values in given.items()
    }
    from_file = {} if config_file is None else _read_toml(config_file)
    return merge_settings(preset, from_file, assigned, options)


def _read_toml(path: Path) -> Values:
    try:
        with os.fdopen(open_regular(path), encoding="utf-8") as file:
            content = tomllib.loads(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}; give a TOML file") from error
    if loose := [key for key, value in content.items() if not isinstance(value, dict)]:
        raise UsageError(
            f"{path}: {', '.join(loose)} must be in a group, such as [loop];"
            " --show-settings lists all groups"
        )
    return content


def describe_settings(values: Values) -> str:
    """Return a TOML settings file with all settings and their descriptions."""
    from edje_index.training.config import GROUPS

    lines = [
        "# Settings of edje-index train. Save them to a file for --config. A setting"
        " that is not set is None."
    ]
    for group, kind in GROUPS.items():
        lines += ["", f"# {str(kind.__doc__).splitlines()[0]}", f"[{group}]"]
        for key, setting in kind.model_fields.items():
            default = None if setting.is_required() else setting.default
            value = values.get(group, {}).get(key, default)
            shown = "not set" if default is None else _toml(default)
            if setting.is_required():
                shown = "required"
            names = [
                choice
                for choice in get_args(setting.annotation)
                if isinstance(choice, str)
            ]
            choices = f" One of {', '.join(names)}." if names else ""
            description = " ".join(str(setting.description).split())
            lines.append(f"# {description}{choices}  [default: {shown}]")
            line = f"# {key} is not set"
            if value is not None:
                line = f"{key} = {_toml(value)}"
            lines.append(line)
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON strings and numbers are also TOML, except for surrogates and U+007F.
    # `default=str` turns paths into strings.
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
