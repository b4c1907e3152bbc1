"""Runs `edje-index` many times, each in a process forked from this one, which has loaded the libraries once.

    LD_PRELOAD=shim.so python -m tests.faults.fork_server SHIM

Reads a JSON object per line, the members of `injection.Request`, and answers with the exit code and output of the
command. A request of the kind "load" runs the command in this process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

from pipelines.cli import main

KINDS = {"count": 0, "error": 1, "short": 2, "kill": 3}


def run(shim: ctypes.CDLL, request: dict[str, Any], output: int) -> int:
    """Exit code of the command. Its standard output and error go to the file `output`."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    folder, operations = (os.fsencode(request[name]) for name in ("folder", "operations"))
    shim.faults_arm(folder, KINDS[request["kind"]], request["error"], ctypes.c_long(request["at"]), operations, log)
    code = main(request["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def wait(pid: int, seconds: float) -> int | None:
    """Exit code of the process, negative for a signal. None if it had to be killed after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def run_forked(shim: ctypes.CDLL, request: dict[str, Any]) -> dict[str, Any]:
    """Exit code and output of the command in a child of this process."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if not pid:
            code = 255
            try:
                code = run(shim, request, output.fileno())
            finally:
                os._exit(code)  # `sys.exit` would free torch's objects, which takes longer than the command
        code = wait(pid, request["seconds"])
        output.seek(0)
        return {"code": code, "output": output.read().decode(errors="replace")}


def serve() -> None:
    """Answer requests until standard input ends."""
    shim = ctypes.CDLL(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # commands that run in this process print there
    for line in sys.stdin:
        request = json.loads(line)
        is_load = request["kind"] == "load"
        answer = {"code": main(request["arguments"]), "output": ""} if is_load else run_forked(shim, request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
