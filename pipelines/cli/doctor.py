"""The command `edje-index doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pipelines.cli.options import PATH, json_option
from pipelines.cli.output import print_json, print_line
from pipelines.progress.wording import counted


@click.command()
@click.argument("path", type=PATH, required=False, metavar="[INDEX|DIR]")
@json_option
def doctor(path: Path | None, as_json: bool) -> int:
    """Check whether this machine is set up well, and advise what to change.

    The command checks the installed packages, the processor, memory, CUDA, and how the kernel can read files. With
    INDEX or DIR, it also measures random reads from that disk for a few seconds. In a DIR that is not an index, it
    writes a temporary index of 200 MB and removes it. If fio is installed, the command also shows the speed that fio
    reaches.

    The exit code is 1 if a problem prevents the use of edje-index.

    \b
    Examples:
      edje-index doctor
      edje-index doctor photos.edje
      edje-index doctor /mnt/ssd --json
    """
    from pipelines.doctor.examine import examine

    findings = []
    for finding in examine(path):
        findings.append(finding)
        if not as_json:
            print_line(f"{finding.level:7}  {finding.check}: {finding.result}")
            if finding.advice:
                print_line(f"{'':7}  -> {finding.advice}")
    problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        print_json({"usable": not problems, "findings": [asdict(finding) for finding in findings]})
    else:
        advised = sum(finding.level == "advice" for finding in findings)
        print_line(f"{counted(problems, 'problem')}, {advised:,} pieces of advice")
    return 1 if problems else 0
