"""Google Cloud Storage: its client replaces an object by its generation, and
refuses to delete an absent object.
"""

from __future__ import annotations

import json

import pytest

from storage_formats.errors import UsageError
from storage_formats.remote.objects import ObjectChangedError, ObjectFolder
from tests.web_server import web_server

obstore_store = pytest.importorskip("obstore.store")


class Bucket:
    """The part of the XML API of Google Cloud Storage that reads, writes and
    deletes objects.
    """

    def __init__(self):
        self.objects: dict[str, tuple[int, bytes]] = {}

    def answer(self, method, path, headers, body):
        generation, data = self.objects.get(path, (0, b""))
        status = 200 if generation else 404
        if method == "DELETE":
            status = 204 if self.objects.pop(path, None) else 404
            data = b""
        elif method == "PUT":
            status = 412
            data = b""
            if int(headers.get("X-Goog-If-Generation-Match", generation)) == generation:
                generation = generation + 1
                status = 200
                self.objects[path] = (generation, body)
        tags = {"x-goog-generation": str(generation), "ETag": f'"{generation}"'}
        return status, {**tags, "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, data


@pytest.fixture
def folder():
    with web_server() as server:
        server.service = Bucket().answer
        account = {
            "gcs_base_url": server.url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
        }
        key = json.dumps({**account, "private_key_id": ""})
        store = obstore_store.GCSStore(
            "bucket", service_account_key=key, client_options={"allow_http": True}
        )
        yield ObjectFolder("gs://bucket", store)


def test_an_object_is_replaced_only_in_the_version_that_was_read(folder):
    folder.replace("index.json", b"first", None)
    with pytest.raises(ObjectChangedError):
        folder.replace("index.json", b"second", None)
    first = folder.read("index.json", 100)
    folder.replace("index.json", b"second", first)
    with pytest.raises(
        ObjectChangedError, match="another writer changed gs://bucket/index"
    ):
        folder.replace("index.json", b"third", first)
    assert folder.read("index.json", 100).data == b"second"


def test_absent_objects_do_not_keep_others_from_being_deleted(folder):
    keys = [str(number) for number in range(40)]
    for key in keys[20:]:
        folder.replace(key, b"content", None)
    folder.delete(keys)
    assert [key for key in keys if folder.info(key)] == []


def test_a_password_in_a_url_is_refused_and_not_shown():
    with pytest.raises(
        UsageError, match="the URL at https://host contains a user name or a password"
    ) as caught:
        ObjectFolder.open("https://me:secret@host/photos.edje")
    assert "secret" not in str(caught.value)
