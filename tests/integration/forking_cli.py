"""Runs commands of `edje-index` in forks of a process that has imported everything, so that many runs take little time.

Reads one JSON list of arguments per line. Prints the process id of each fork when it starts, and its exit code when it
ends (negative for a signal). The forks write to the file that the first argument of this script names.
"""

from __future__ import annotations

import json
import os
import sys


def _run(arguments: list[str], output: str) -> int:
    from pipelines.cli import main

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    return main(arguments)


def _serve(output: str) -> None:
    import edje_index.indexing.faiss_index
    import edje_index.indexing.image_encoder  # noqa: F401
    import pipelines.cli.main
    import pipelines.jobs.add_rows
    import pipelines.jobs.build
    import pipelines.jobs.copy
    import pipelines.jobs.quantize
    import pipelines.jobs.snapshots  # noqa: F401

    for line in sys.stdin:
        process = os.fork()
        if not process:
            code = 70
            try:
                code = _run(json.loads(line), output)
                sys.stdout.flush()
            finally:
                os._exit(code)
        print(process, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
