from __future__ import annotations

import faiss
import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of FAISS wait for each other actively, which is slow for such small indexes on a busy machine."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)
