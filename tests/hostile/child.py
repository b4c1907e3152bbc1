"""Runs a function in a child process, so that a crash, a hang or the use of too
much memory ends only the child.
"""

import gc
import json
import os
import signal

SECONDS = 60


def in_child(load, path):
    """What `load` returns in a child process, or how the process ended."""
    # a collection in the child would copy all memory of this process
    gc.freeze()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            # ends the process
            signal.alarm(SECONDS)
            os.write(writing, json.dumps(load(path)).encode())
            os._exit(0)
        except BaseException as error:
            os.write(writing, json.dumps({"unexpected": repr(error)}).encode())
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    return (
        json.loads(answer) if answer else {"ended": os.waitstatus_to_exitcode(status)}
    )
