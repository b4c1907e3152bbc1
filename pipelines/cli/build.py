"""The commands `edje-index build`, `append`, `update` and `import-arrays`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.cli.command import Job, command
from pipelines.cli.output import note
from pipelines.progress.wording import counted

if TYPE_CHECKING:
    from pipelines.jobs.build import BuildResult


@command(
    "pipelines.jobs.build:build_index",
    resume=True,
    out="--out",
    model="--model",
    precisions="--precision",
)
def build(job: Job) -> None:
    """Build a new index of the images in every SOURCE.

    A SOURCE is a directory, an archive (tar, zip), a Parquet file of images, an image
    file, or a list of paths (Parquet, CSV, TSV, JSON Lines or text, or - for standard
    input). Directories are searched recursively. Quoted patterns such as
    'shards/{0000..0015}.tar' and 'data/*.parquet' name several files. A SOURCE can also
    be a URL that begins with https://, s3://, gs://, az:// or hf://.

    An image that cannot be read becomes a failed row. 'edje-index failures'
    lists the failed rows with their reasons. If more images fail than --max-failed
    allows, the build stops with exit code 1 and keeps the finished shards.

    Run the same command again to resume a stopped build. If the index is already
    finished, the command does nothing.

    \b
    Examples:
      edje-index build photos --out photos.edje --model model
      edje-index build 'cc3m/{00000..00331}.tar' --out cc3m.edje --model model --dedupe
      edje-index build 'data/train-*.parquet' --column image --out hf.edje --model model
      edje-index build photos --out photos.edje --model model --exclude '*.png' \\
        --exclude '/screenshots/'
      edje-index build s3://bucket/photos --out photos.edje --model model
      find photos -name '*.jpg' | edje-index build - --out found.edje --model model
      edje-index build list.parquet --column image_path --out list.edje \\
        --model model --device cuda
      edje-index build photos --out photos.edje --model model --address head:6379
      edje-index build clips --out clips.edje --model model --frames 8
    """
    from pipelines.jobs.hub import find_model

    _note_failures(job, job.run(model=find_model(str(job.given["model"]), note)))


def _note_failures(job: Job, result: BuildResult) -> None:
    if result.failed and not result.dry_run:
        index = job.given.get("out") or job.given["index"]
        failed = counted(result.failed, "input")
        note(f"{failed} failed; 'edje-index failures {index}' lists them")


@command("pipelines.jobs.update:append_index", resume=True, workers=None, address=None)
def append(job: Job) -> None:
    """Add the images of every SOURCE to INDEX.

    'edje-index build --help' describes SOURCE. New rows are encoded with the settings
    of INDEX. Images that INDEX already contains are skipped and reported as duplicates.
    Existing rows keep their ids. INDEX can be searched during the append.

    Run the same command again to resume a stopped append.

    \b
    Examples:
      edje-index append photos.edje photos/2026
      edje-index append cc3m.edje 'cc3m/{00332..00340}.tar' --engine inline
    """
    _note_failures(job, job.run())


@command("pipelines.jobs.update:update_index", resume=True, workers=None, address=None)
def update(job: Job) -> None:
    """Add, replace and delete rows so that INDEX matches its sources.

    Without SOURCE, the command uses the sources recorded in INDEX. If you give SOURCE,
    name all sources of INDEX, because the rows of other sources are deleted.
    'edje-index build --help' describes SOURCE.

    New and changed files get new rows. The old rows of changed files and the rows of
    missing files are deleted. Unchanged files are read but not encoded again; if their
    captions or other columns changed, only these are replaced. Rows that 'edje-index
    delete' removed stay deleted until --restore. A program that has INDEX open must
    reopen it to see the changes.

    With --retry-failed, the failed inputs that 'edje-index failures' lists are tried
    again, too. If nothing else has changed and every input fails again, INDEX does not
    change.

    If a source cannot be read, or too many files are missing, the command stops without
    changing INDEX.

    \b
    Examples:
      edje-index update photos.edje --dry-run
      edje-index update photos.edje
      edje-index update photos.edje --retry-failed
    """
    _note_failures(job, job.run())


@command(
    "pipelines.jobs.import_arrays:import_arrays",
    out="--out",
    precisions="--precision",
)
def import_arrays(job: Job) -> None:
    """Make an index from arrays of tokens and embeddings that your own encoder
    computed, or append such arrays to the index.

    \b
    TOKENS      .npy file, shape [rows, tokens per row, width]: float32, float16, or
                bfloat16 saved as uint16
    EMBEDDINGS  .npy file, shape [rows, width]: any floating-point type
    ROWS        Parquet file with the column uri and optionally uri_raw, size,
                content_hash, width, height; other columns, such as captions, are kept

    Embeddings are normalised to unit length. Without ROWS, the URI of each row is the
    row id. The index works with 'info', 'verify', 'quantize', 'bench fetch' and the
    Python interface. Text search is not possible, because the index has no model.

    \b
    Examples:
      edje-index import-arrays tokens.npy embeddings.npy \\
        --out pages.edje --precision fp8
      edje-index import-arrays tokens.npy embeddings.npy rows.parquet \\
        --out pages.edje --encoder colpali-v1.3
      edje-index import-arrays more.npy embeddings2.npy --out pages.edje --append
    """
