"""Clients that this project did not write, against a real service."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edje_index import TokenIndex

pytestmark = [
    pytest.mark.slow,
    # clients leave connections open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROWS = [3, 0, 9, 7]


@pytest.fixture(scope="module")
def expected(index):
    """(position, relevance) of `ROWS`, best first, from the library."""
    return [
        (ROWS.index(hit.row_id), hit.relevance)
        for hit in TokenIndex.open(index).rerank("a dog", ROWS)
    ]


def check(pairs, expected):
    assert [position for position, _ in pairs] == [position for position, _ in expected]
    assert [score for _, score in pairs] == pytest.approx(
        [score for _, score in expected], abs=5e-6
    )


def test_the_client_of_cohere(service, expected):
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="any", base_url=service.url)
    answer = client.rerank(
        model="rerank-v3.5",
        query="a dog",
        documents=[str(row) for row in ROWS],
        top_n=3,
    )
    check(
        [(result.index, result.relevance_score) for result in answer.results],
        expected[:3],
    )
    with pytest.raises(cohere.errors.UnprocessableEntityError, match="out of range"):
        client.rerank(model="any", query="a dog", documents=["99"])


def test_a_client_of_text_embeddings_inference(service, expected):
    client = pytest.importorskip("tei_client").HttpClient(service.url)
    assert client.health()
    assert client.info().server_model_id == "photos"
    answer = client.rerank("a dog", [str(row) for row in ROWS])
    check([(rank.index, rank.score) for rank in answer.ranks], expected)


def test_the_client_of_hugging_face(service, index):
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(model=f"{service.url}/embed")
    embedding = client.feature_extraction("a dog")
    np.testing.assert_allclose(
        embedding, TokenIndex.open(index).model.text.encode(["a dog"]), atol=1e-5
    )


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
