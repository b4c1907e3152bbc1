"""The command `edje-index bench paper`."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.commands.output import show
from pipelines.cli.options import json_option
from storage_formats.atomic import write_bytes_atomic
from storage_formats.errors import UsageError

_PATH = click.Path(exists=True, path_type=Path)


@click.command("paper")
@click.argument("experiments", metavar="[EXPERIMENT]...", nargs=-1)
@click.option("--data", type=_PATH, required=True, help="Directory of the data sets, towers and language models.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory for models, indexes and tables.")
@click.option("--small", is_flag=True, help="Use a few Flickr8k images instead of the full data.")
@click.option("--model", type=_PATH, help="Model bundle with the towers for --small.")
@click.option("--config", type=_PATH, help="TOML file with settings for all training runs.")
@click.option("--commands", "listing", is_flag=True, help="Print the remaining commands without running them.")
@json_option
def paper_command(
    experiments: tuple[str, ...],
    data: Path,
    out: Path,
    small: bool,
    model: Path | None,
    config: Path | None,
    listing: bool,
    as_json: bool,
) -> None:
    """Repeat the tables and figures of the EDJE paper, and compare the results with the published values.

    Without EXPERIMENT, the command lists the experiments. 'all' runs every experiment. To continue after an
    interruption, run the same command again: finished models and indexes in --out are used again.

    If data for a row are missing, the table says which files to put where. If no row could be measured, the exit code
    is 1.

    \b
    Examples:
      edje-index bench paper --data data --out study
      edje-index bench paper tokens --data data --out study --commands
      edje-index bench paper all --data flickr-data --small --model model --out study
    """
    from benchmarks.paper.data import Data, FullData, SmallData
    from benchmarks.paper.experiments import EXPERIMENTS
    from benchmarks.paper.steps import Steps
    from benchmarks.paper.study import Study

    if small != (model is not None):
        raise UsageError("use --small and --model together: --small uses the towers of --model")
    names = tuple(EXPERIMENTS) if experiments in ((), ("all",)) else experiments
    for name in names:
        if name not in EXPERIMENTS:
            raise UsageError(f"there is no experiment '{name}': choose from {', '.join(EXPERIMENTS)}, or 'all'")
    if not experiments:
        lines = [f"{name:16} {(function.__doc__ or '').splitlines()[0]}" for name, function in EXPERIMENTS.items()]
        show({"experiments": list(EXPERIMENTS)}, as_json, lines)
        return
    options = () if config is None else ("--config", str(config.absolute()))
    source: Data = FullData(data.absolute(), options)
    if model is not None:
        source = SmallData(data.absolute(), model.absolute(), out.absolute() / "captions", options)
    study = Study(source, Steps(out.absolute() / "steps", lambda line: click.echo(line, err=not listing), listing))
    tables = {name: EXPERIMENTS[name](study) for name in names}
    if listing:
        return
    for name, table in tables.items():
        write_bytes_atomic(out / f"{name}.md", "\n".join([*table.lines(), ""]).encode())
    report = {name: table.as_json() for name, table in tables.items()}
    show(report, as_json, [line for table in tables.values() for line in (*table.lines(), "")])
    if all(table.state == "needs data" for table in tables.values()):
        click.get_current_context().exit(1)
