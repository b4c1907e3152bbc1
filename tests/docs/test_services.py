"""The services that the guides start answer, and so does the code of the guides
that uses them.
"""

import gc
import subprocess

import pytest

from tests.command_line import command
from tests.docs.test_commands import (
    REPO,
    blocks,
    python_code,
)
from tests.pipelines.service.server import serving

pytestmark = pytest.mark.slow
GUIDE = REPO / "docs/serve.md"
ADDRESS = "http://127.0.0.1:8000"


# that of Cohere leaves connections open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_requests_of_the_guide_are_answered(template, home):
    codes = [
        code
        for code in python_code(GUIDE)
        if "cohere" not in code or pytest.importorskip("cohere")
    ]
    requests = [block for block in blocks(GUIDE) if block.startswith("curl ")]
    assert (len(codes), len(requests)) == (2, 2)
    with serving(home, command("serve", "photos.edje", "--port", "0")) as service:
        for code in codes:
            code = code.replace(ADDRESS, service.url).replace(
                "/photos/lake.jpg", str(template / "photos/00012.png")
            )
            exec(compile(code, str(GUIDE), "exec"), {})
        # of the connections, while their warnings are ignored
        gc.collect()
        for request in requests:
            words = request.replace(ADDRESS, service.url)
            done = subprocess.run(
                ["bash", "-c", f"{words} --fail --silent"],
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stdout.count('"row_id"') == 5
