"""Archives with given members, in the given order."""

import io
import re
import tarfile
import zipfile


def _pairs(members):
    return members.items() if isinstance(members, dict) else members


def write_tar(path, members, form=tarfile.PAX_FORMAT):
    """The last suffix of the name is the compression."""
    kind = path.suffix.removeprefix(".").replace("tgz", "gz").replace("tar", "")
    with tarfile.open(path, f"w:{kind}", format=form) as archive:
        for name, data in _pairs(members):
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in _pairs(members):
            archive.writestr(name, data)
    return path


def with_utf8_flag(content):
    """A zip that says that the names of its members are UTF-8."""
    for header in (rb"(PK\x03\x04...).", rb"(PK\x01\x02.....)."):
        content = re.sub(header, b"\\1\x08", content, flags=re.DOTALL)
    return content
