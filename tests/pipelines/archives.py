"""Archives with given members, in the given order."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

Members = dict[str, bytes] | Iterable[tuple[str | tarfile.TarInfo, bytes]]


def _pairs(members: Members) -> Iterable[tuple]:
    return members.items() if isinstance(members, dict) else members


def write_tar(path: Path, members: Members, form: int = tarfile.PAX_FORMAT) -> Path:
    """The last suffix of the name is the compression."""
    kind = path.suffix.removeprefix(".").replace("tgz", "gz").replace("tar", "")
    with tarfile.open(path, f"w:{kind}", format=form) as archive:
        for name, data in _pairs(members):
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_zip(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in _pairs(members):
            archive.writestr(name, data)
    return path


def with_utf8_flag(content: bytes) -> bytes:
    """A zip that says that the names of its members are UTF-8."""
    for header in (rb"(PK\x03\x04...).", rb"(PK\x01\x02.....)."):
        content = re.sub(header, b"\\1\x08", content, flags=re.DOTALL)
    return content
