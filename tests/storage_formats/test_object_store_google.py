"""Google Cloud Storage: its client replaces an object by its generation, and refuses to delete an absent object."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from storage_formats.errors import UsageError
from storage_formats.format.object_store import ObjectChangedError, ObjectFolder

obstore_store = pytest.importorskip("obstore.store")


class Bucket(BaseHTTPRequestHandler):
    """The part of the XML API of Google Cloud Storage that reads, writes and deletes objects."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[int, bytes]]

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        generation, _ = self.objects.get(self.path, (0, b""))
        if int(self.headers.get("x-goog-if-generation-match", generation)) != generation:
            return self.respond(412, 0, b"")
        self.objects[self.path] = (generation + 1, data)
        return self.respond(200, generation + 1, b"")

    def do_GET(self) -> None:
        generation, data = self.objects.get(self.path, (0, b""))
        self.respond(200 if generation else 404, generation, data)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.respond(204 if self.objects.pop(self.path, None) else 404, 0, b"")

    def respond(self, status: int, generation: int, data: bytes) -> None:
        self.send_response_only(status)
        headers = {"Content-Length": len(data), "x-goog-generation": generation, "ETag": f'"{generation}"'}
        for name, value in {**headers, "Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}.items():
            self.send_header(name, str(value))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b"" if self.command == "HEAD" else data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def folder():
    handler: Any = type("Handler", (Bucket,), {"objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        account = {"gcs_base_url": address, "disable_oauth": True, "client_email": "", "private_key": ""}
        key = json.dumps({**account, "private_key_id": ""})
        store = obstore_store.GCSStore("bucket", service_account_key=key, client_options={"allow_http": True})
        yield ObjectFolder("gs://bucket", store)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_object_is_replaced_only_in_the_version_that_was_read(folder):
    folder.replace("index.json", b"first", None)
    with pytest.raises(ObjectChangedError):
        folder.replace("index.json", b"second", None)
    first = folder.read("index.json", 100)
    folder.replace("index.json", b"second", first)
    with pytest.raises(ObjectChangedError, match="another writer changed gs://bucket/index"):
        folder.replace("index.json", b"third", first)
    assert folder.read("index.json", 100).data == b"second"


def test_absent_objects_do_not_keep_others_from_being_deleted(folder):
    keys = [str(number) for number in range(40)]
    for key in keys[20:]:
        folder.replace(key, b"content", None)
    folder.delete(keys)
    assert [key for key in keys if folder.info(key)] == []


def test_a_password_in_a_url_is_refused_and_not_shown():
    with pytest.raises(UsageError, match="the URL at https://host contains a user name or a password") as caught:
        ObjectFolder.open("https://me:secret@host/photos.edje")
    assert "secret" not in str(caught.value)
