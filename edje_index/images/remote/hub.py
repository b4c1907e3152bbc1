"""Files on the Hugging Face Hub. Their URLs are `hf://datasets/OWNER/NAME[@REVISION]/PATH`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import quote

from edje_index.images.remote.listing import Folder, RemoteFile
from edje_index.images.remote.web import read_web_json

DEFAULT_ENDPOINT = "https://huggingface.co"
_MAX_PAGE_BYTES = 64 << 20
_KINDS = ("datasets", "spaces")
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')


@dataclass(frozen=True)
class HubFile:
    """A file or directory of a repository on the Hub.

    Attributes:
        repository: path of the repository on the server, for example "datasets/OWNER/NAME".
        revision: branch, tag or commit.
        path: path in the repository.
    """

    repository: str
    revision: str
    path: str

    @classmethod
    def parse(cls, url: str) -> HubFile:
        """Return the file that a URL names.

        Raises:
            ValueError: the URL names no repository.
        """
        parts = url.partition("://")[2].strip("/").split("/")
        length = 3 if parts[0] in _KINDS else 2
        if len(parts) < length or not all(parts):
            raise ValueError(f"{url} names no repository; give a URL such as hf://datasets/OWNER/NAME/data")
        repository, _, revision = "/".join(parts[:length]).partition("@")
        return cls(repository, revision or "main", "/".join(parts[length:]))

    @property
    def url(self) -> str:
        """URL of the content."""
        return f"{_endpoint()}/{self.repository}/resolve/{quote(self.revision, safe='')}/{quote(self.path)}"

    @property
    def listing_url(self) -> str:
        """URL of the list of files in this directory."""
        kind = "" if self.repository.split("/")[0] in _KINDS else "models/"
        return f"{_endpoint()}/api/{kind}{self.repository}/tree/{quote(self.revision, safe='')}/{quote(self.path)}"


def hub_headers() -> dict[str, str]:
    """Return the headers of a request to the Hub: the token in the environment variable HF_TOKEN, if there is one."""
    token = os.environ.get("HF_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def list_hub_folder(url: str) -> Folder:
    """Return the files and directories in a directory on the Hub.

    Raises:
        ValueError: the URL names no repository.
        OSError: the Hub refuses the request or does not respond.
    """
    directory = HubFile.parse(url)
    files: list[RemoteFile] = []
    directories: list[str] = []
    page: str | None = directory.listing_url.rstrip("/")
    while page is not None:
        entries, headers = read_web_json(page, hub_headers(), _MAX_PAGE_BYTES)
        for entry in entries:
            name = str(entry["path"]).rpartition("/")[2]
            if entry["type"] == "directory":
                directories.append(name)
            else:
                files.append(RemoteFile(name, int(entry["size"])))
        following = _NEXT.search(headers.get("Link", ""))
        page = following[1] if following else None
    return Folder(files, directories)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")
