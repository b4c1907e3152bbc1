"""The command `edje-index verify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pipelines.cli.options import PATH, json_option
from pipelines.cli.output import note, print_json, print_line
from pipelines.progress.wording import counted


@click.command()
@click.argument("index", type=PATH)
@json_option
def verify(index: Path, as_json: bool) -> int:
    """Check every file of INDEX: lengths, checksums, rows and counts.

    If zarr-python is installed, the command also checks that zarr-python can open the arrays. The exit code is 1 if
    the command finds a problem.

    \b
    Examples:
      edje-index verify photos.edje
      edje-index verify photos.edje --json
    """
    from storage_formats.verify import verify_index

    problems = verify_index(index)
    if as_json:
        print_json({"index": str(index), "sound": not problems, "problems": [asdict(problem) for problem in problems]})
    for problem in problems:
        note(f"{problem.path}: {problem.message}")
    if not as_json:
        print_line(f"{index}: {counted(len(problems), 'problem') if problems else 'sound'}")
    return 1 if problems else 0
