"""A server in this process that speaks the protocol of the Hugging Face Hub, for
uploads and downloads.
"""

import base64
import contextlib
import hashlib
import json
import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from tests.web_server import web_server

TOKEN = "secret"
_PLACE = re.compile(
    r"/(?:api/models/|api/)?((?:datasets/)?[\w-]+/[\w-]+)"
    r"/(revision|tree|preupload|commit|resolve)/(\w+)/?(.*)"
)


@dataclass
class Hub:
    """The state of the server. Files with zero bytes are large: their contents are at
    another host name.

    Attributes:
        repositories: contents by name, by repository such as "datasets/owner/name".
        commits: number of commits, by repository.
        blobs: contents of large files by SHA-256.
        refused: status of the next requests, by the beginning of method and path.
        moving: repositories that get a commit after each request for a revision.
        sizes: sizes that the server claims for files, by repository and name.
        redirects: URLs that large files are redirected to instead, by repository and
            name.
    """

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, int] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    blobs: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)

    def add(self, name, files):
        self.repositories[name] = files
        self.commits[name] = 0

    def answer(self, method, path, headers, body):
        path = unquote(urlsplit(path).path)
        if status := next(
            (
                self.refused[each]
                for each in self.refused
                if f"{method} {path}".startswith(each)
            ),
            0,
        ):
            return _json({"error": "refused"}, status)
        if path.startswith("/lfs/"):
            sha256 = path.removeprefix("/lfs/")
            if method == "PUT":
                assert hashlib.sha256(body).hexdigest() == sha256
                self.blobs[sha256] = body
                return _json({})
            assert "Authorization" not in headers, "the token went to another host"
            return 200, {"ETag": f'"{sha256}"'}, self.blobs[sha256]
        place = _PLACE.fullmatch(path)
        is_public = (
            place is not None
            and method in ("GET", "HEAD")
            and place[1] in self.repositories.keys() - self.private
        )
        if headers.get("Authorization") != f"Bearer {TOKEN}" and not is_public:
            return _json({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            value = json.loads(body)
            name = f"{value['organization']}/{value['name']}"
            if value.get("type") == "dataset":
                name = f"datasets/{name}"
            status = 409 if name in self.repositories else 200
            if status == 200:
                self.add(name, {".gitattributes": b""})
                self.private |= (
                    {name} if "private" in (value.get("visibility"), *value) else set()
                )
            return _json({"url": f"{self.url}/{name}"}, status)
        if path == "/api/validate-yaml":
            return _json({})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                if each["oid"] not in self.blobs:
                    each["actions"] = {
                        "upload": {"href": f"{self.url}/lfs/{each['oid']}"}
                    }
            return _json({"transfer": "basic", "objects": objects})
        if place is None or place[1] not in self.repositories:
            return _json({"error": "Repository not found"}, 404)
        name, action, _, below = place.groups()
        files = self.repositories[name]
        sha = hashlib.sha1(f"{name} {self.commits[name]}".encode()).hexdigest()
        if action == "revision":
            self.commits[name] += name in self.moving
            siblings = [
                {
                    **_entry(each, data),
                    "rfilename": each,
                    "size": self.sizes.get(f"{name}/{each}", len(data)),
                }
                for each, data in files.items()
            ]
            card = re.search(rb"^license: (\S+)$", files.get("README.md", b""), re.M)
            return _json(
                {
                    "id": name.removeprefix("datasets/"),
                    "sha": sha,
                    "siblings": siblings,
                    "cardData": {"license": card[1].decode()} if card else None,
                }
            )
        if action == "tree":
            return _json(
                [
                    _entry(each, data)
                    for each, data in files.items()
                    if each.startswith(below)
                ]
            )
        if action == "preupload":
            return _json(
                {
                    "files": [
                        {
                            "path": each["path"],
                            "uploadMode": _mode(base64.b64decode(each["sample"])),
                            "shouldIgnore": False,
                        }
                        for each in json.loads(body)["files"]
                    ]
                }
            )
        if action == "commit":
            return self.commit(
                name, sha, [json.loads(line) for line in body.splitlines()]
            )
        if below not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        data = files[below]
        sha256 = hashlib.sha256(data).hexdigest()
        # a test may have changed the file
        self.blobs[sha256] = data
        if _mode(data) == "regular":
            return 200, {"X-Repo-Commit": sha, "ETag": f'"{_git_id(data)}"'}, data
        links = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256}"'}
        location = self.redirects.get(
            f"{name}/{below}",
            f"{self.url.replace('127.0.0.1', 'localhost')}/lfs/{sha256}",
        )
        return 302, {"X-Repo-Commit": sha, "Location": location, **links}, b""

    def commit(self, name, sha, lines):
        files = dict(self.repositories[name])
        for line in lines[1:]:
            value = line["value"]
            is_large = line["key"] == "lfsFile"
            files[value["path"]] = (
                self.blobs[value["oid"]]
                if is_large
                else base64.b64decode(value["content"])
            )
        self.repositories[name] = files
        self.commits[name] += 1
        return _json({"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha})


def _mode(data):
    return "lfs" if b"\0" in data else "regular"


def _entry(name, data):
    lfs = {
        "lfs": {
            "oid": hashlib.sha256(data).hexdigest(),
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "pointerSize": 130,
        }
    }
    return {
        "type": "file",
        "path": name,
        "size": len(data),
        "oid": _git_id(data),
        "blobId": _git_id(data),
        **(lfs if _mode(data) == "lfs" else {}),
    }


def _git_id(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _json(value, status=200):
    return status, {}, json.dumps(value).encode()


@contextlib.contextmanager
def hub_server():
    with web_server() as server:
        hub = Hub(server.url)
        server.service = hub.answer
        yield hub
