"""The headers of a tar archive, read without its data: POSIX ustar and pax, GNU long names, old V7.

Why not `tarfile`: it ends in silence at a damaged header in the middle, some releases of the supported Pythons
loop for ever on negative sizes (CVE-2025-8194), and it takes twice as long. It is the oracle of the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = 512
_RECORD = 20 * BLOCK  # archives are padded with zeros to a multiple of this
_MAX_EXTENSION = 1 << 20  # longest pax or long-name record that is believed
_MAX_SIZE = 1 << 62  # of a member; more would leave the range of file offsets
_ZEROS = bytes(BLOCK)

REGULAR, HARD_LINK, SYMBOLIC_LINK, FOLDER, OTHER, SPARSE = "regular", "hard link", "link", "folder", "other", "sparse"
_KINDS = {
    b"0": REGULAR,
    b"\0": REGULAR,
    b"7": REGULAR,
    b"1": HARD_LINK,
    b"2": SYMBOLIC_LINK,
    b"5": FOLDER,
    b"S": SPARSE,
}
_WITHOUT_DATA = frozenset(b"123456")


@dataclass(frozen=True, slots=True)
class TarMember:
    """One member. `offset` and `size` (bytes) say where its data lies; of a sparse one, its packed data."""

    name: bytes
    kind: str
    offset: int
    size: int


class TarDamage(Exception):
    """The archive cannot be read on from here. `reason` is one of `edje_index.images.decode.REASONS`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def iter_members(fd: int) -> Iterator[TarMember]:
    """Members in their order, through archives joined end to end. Reads 512 bytes a member, at its header.

    Raises:
        TarDamage: after the last member that could be read: "truncated-archive" where the file ends before the
            end marker does, "damaged-archive" where a header contradicts its checksum or itself.
        OSError: the file cannot be read.
    """
    place = 0
    extended: dict[bytes, bytes] = {}
    while True:
        header = os.pread(fd, BLOCK, place)
        if len(header) < BLOCK:
            raise TarDamage("truncated-archive", f"it ends at byte {place + len(header)}, without the end marker")
        if header == _ZEROS:
            following = os.pread(fd, _RECORD, place + BLOCK)
            if not following.strip(b"\0"):
                return
            place += BLOCK
            continue
        kind, size, data = header[156:157], _checked_size(header, place), place + BLOCK
        if kind in b"xgLK" and kind:
            extended |= _extension(fd, kind, data, size)
            place = data + _padded(size)
            continue
        if kind == b"S":
            data = _after_sparse_map(fd, header, data)
        size = _number(extended.get(b"size"), size, place)
        yield _member(header, extended, data, size)
        extended = {}
        place = data + (0 if kind[0] in _WITHOUT_DATA else _padded(size))


def _checked_size(header: bytes, place: int) -> int:
    try:
        checksum = int(header[148:156].strip(b" \0"), 8)
        first = header[124]
        size = (
            int.from_bytes(header[125:136], "big") if first == 0x80 else int(header[124:136].strip(b" \0") or b"0", 8)
        )
    except ValueError as error:
        raise TarDamage("damaged-archive", f"no header at byte {place}, where one has to be") from error
    total = sum(header) - sum(header[148:156]) + 8 * 0x20
    signed = total - 256 * sum(byte > 127 for byte in header[:148] + header[156:]) if total != checksum else total
    if checksum not in (total, signed) or not 0 <= size < _MAX_SIZE:
        raise TarDamage("damaged-archive", f"the header at byte {place} contradicts its checksum")
    return size


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _number(text: bytes | None, otherwise: int, place: int) -> int:
    if text is None:
        return otherwise
    if not text.isdigit() or len(text) > len(str(_MAX_SIZE)) or int(text) >= _MAX_SIZE:
        raise TarDamage("damaged-archive", f"the member at byte {place} has the size {text[:20]!r}")
    return int(text)


def _member(header: bytes, extended: dict[bytes, bytes], data: int, size: int) -> TarMember:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0]
    if prefix and header[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    name = extended.get(b"GNU.sparse.name") or extended.get(b"path") or name
    kind = _KINDS.get(header[156:157], OTHER)
    if kind == REGULAR and any(key.startswith(b"GNU.sparse.") for key in extended):
        kind = SPARSE
    if kind == REGULAR and name.endswith(b"/"):  # V7 has no type for folders
        kind = FOLDER
    return TarMember(name, kind, data, size)


def _extension(fd: int, kind: bytes, place: int, size: int) -> dict[bytes, bytes]:
    """What an extension header says of the next member; global ones and link names change nothing here."""
    if kind in (b"g", b"K"):
        return {}
    if size > _MAX_EXTENSION:
        raise TarDamage("damaged-archive", f"an extension header of {size} bytes at byte {place}")
    text = os.pread(fd, size, place)
    if len(text) < size:
        raise TarDamage("truncated-archive", f"it ends inside the extension header at byte {place}")
    return {b"path": text.partition(b"\0")[0]} if kind == b"L" else _pax_records(text, place)


def _pax_records(text: bytes, place: int) -> dict[bytes, bytes]:
    """POSIX.1-2001: "<length> <key>=<value>\\n", the length being that of the whole record."""
    records: dict[bytes, bytes] = {}
    while text.strip(b"\0"):
        digits, _, rest = text.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        key, separator, value = rest[: length - len(digits) - 1].partition(b"=")
        if not separator or not value.endswith(b"\n") or length > len(text):
            raise TarDamage("damaged-archive", f"the pax header at byte {place} is malformed")
        records[key] = value[:-1]
        text = text[length:]
    return records


def _after_sparse_map(fd: int, header: bytes, place: int) -> int:
    """Place after the extra blocks of a GNU sparse header: each says in its byte 504 whether another follows."""
    more = header[482]
    while more:
        block = os.pread(fd, BLOCK, place)
        if len(block) < BLOCK:
            raise TarDamage("truncated-archive", f"it ends inside the sparse map at byte {place}")
        more, place = block[504], place + BLOCK
    return place
