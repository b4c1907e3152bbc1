import pytest


@pytest.fixture(autouse=True)
def one_thread(one_faiss_thread):
    """See `one_faiss_thread`."""
