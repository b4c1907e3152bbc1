"""Copies to an object store whose requests are lost, repeated, late, or end for ever,
one after another.

After each fault, readers see the index before or after the copy, `verify` finds no
damage, and the same copy ends as an undisturbed one.
"""

import itertools
import shutil
from collections import Counter

import pytest

from pipelines import copy_index, delete_rows
from pipelines.jobs import copy
from storage_formats import (
    EdjeError,
    IncompleteIndexError,
    IndexSpec,
    TokenStore,
    UsageError,
    verify_index,
)
from storage_formats.format import prefix
from storage_formats.remote import objects
from storage_formats.remote.objects import ObjectFolder
from tests.conftest import write_random_index
from tests.object_store import FaultyProxy, s3_server, use_endpoint

# they start a server
pytestmark = pytest.mark.slow
SPEC = IndexSpec(2, 2, (1, 16), 4)
CASES = {
    "new": ("", "first", False),
    "next": ("first", "second", False),
    "replace": ("other", "first", True),
}
"""The index at the URL before the copy, the index that is copied, and whether it
may replace the one before.
"""
FAULTS = ("reset", "503", "truncate", "lost", "twice", "late", "cut", "lost and cut")
"""What happens to one request, see `tests.object_store.Fault`. After a cut, no
request arrives: the process is gone.
"""


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes")
    write_random_index(folder / "first", SPEC, seed=1)
    write_random_index(folder / "other", SPEC, seed=2)
    shutil.copytree(folder / "first", folder / "second")
    delete_rows(folder / "second", rows=[1])
    return folder


def view(location):
    """What readers see: the row ids and the tokens. None if there is no index."""
    try:
        with TokenStore.open(location) as store:
            return store.row_ids().tolist(), store.fetch(store.row_ids()).tobytes()
    except (UsageError, IncompleteIndexError):
        return None


@pytest.mark.parametrize("case", CASES)
def test_every_request_of_a_copy_meets_every_fault(
    indexes, tmp_path, monkeypatch, case
):
    before, source, replaces = CASES[case]
    monkeypatch.setenv("EDJE_CACHE", str(tmp_path / "cache"))
    # so that the requests have an order
    monkeypatch.setattr(copy, "_FILES_AT_ONCE", 1)
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(objects, "_RETRIES", 1)
    # After a cut, the claim stays. It is that of a process that has ended.
    monkeypatch.setattr(prefix, "_runs", lambda pid, started: False)
    counts = Counter()
    with s3_server() as server, FaultyProxy(server).running() as proxy:

        def copy_with(fault, at, name):
            """Copy to a new URL. Return the number of requests of the copy, and its
            error.
            """
            proxy.fault = lambda method, path: None
            use_endpoint(monkeypatch, server)
            url = f"s3://bucket/{name}"
            if before:
                copy_index(indexes / before, url)
            use_endpoint(monkeypatch, proxy.url)
            first = len(proxy.requests)
            error = None

            def decide(method, path):
                number = len(proxy.requests) - first
                if number > at and "cut" in fault:
                    return "reset"
                return (
                    fault.removesuffix(" and cut").replace("cut", "reset")
                    if number == at
                    else None
                )

            proxy.fault = decide
            try:
                copy_index(indexes / source, url, replace=replaces)
            except EdjeError as raised:
                error = str(raised)
            requests = len(proxy.requests) - first
            proxy.do_late_requests()
            use_endpoint(monkeypatch, server)
            return requests, error

        requests, error = copy_with("none", 0, f"{case}-reference")
        assert error is None
        reference = ObjectFolder.open(f"s3://bucket/{case}-reference").list_sizes()
        views = [
            view(indexes / before) if before else None,
            view(indexes / source),
            *([None] if replaces else []),
        ]
        problems = []
        for fault, at in itertools.product(FAULTS, range(1, requests + 1)):
            url = f"s3://bucket/{case}-{fault.replace(' ', '-')}-{at}"
            _, error = copy_with(fault, at, url.removeprefix("s3://bucket/"))
            counts[fault] += 1
            counts[f"{fault}: errors"] += error is not None
            try:
                seen = view(url)
                damage = (
                    []
                    if seen is None
                    else [
                        each for each in verify_index(url) if each.code != "stray-file"
                    ]
                )
                if damage or seen not in (views if error else views[1:2]):
                    problems.append(
                        f"{fault} at {at}: {damage}, sees {seen}, error {error}"
                    )
                if error and "cut" not in fault:
                    problems.append(f"{fault} at {at}: {error}")
                copy_index(indexes / source, url, replace=replaces)
                if (
                    view(url) != views[1]
                    or verify_index(url)
                    or ObjectFolder.open(url).list_sizes() != reference
                ):
                    problems.append(
                        f"{fault} at {at}: copied again,"
                        f" {ObjectFolder.open(url).list_sizes()}"
                    )
            except EdjeError as raised:
                problems.append(f"{fault} at {at}: {raised}; the copy: {error}")
    print(f"{case}: {requests} requests, faults: {dict(counts)}")
    assert not problems, f"{len(problems)} problems: {problems[:20]}"
