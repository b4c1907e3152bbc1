"""A fuzzer that this project did not write sends requests made from the service's
own description.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


@pytest.mark.slow
def test_no_request_made_from_the_description_is_a_server_error(service, tmp_path):
    pytest.importorskip("schemathesis")
    program = shutil.which("st", path=str(Path(sys.executable).parent))
    assert program is not None
    done = subprocess.run(
        [
            program,
            "run",
            f"{service.url}/openapi.json",
            "--checks",
            CHECKS,
            "--max-examples",
            "60",
            "--no-color",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Traceback" not in service.log.read_text()
