"""Fixtures of the tests of the documentation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import environment
from tests.conftest import REPO
from tests.docs.guide_files import write_guide_files

sys.path.insert(0, str(REPO / "docs/hooks"))  # as MkDocs does when it loads hooks


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: any warning is an error."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(words, cwd=REPO, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Path:
    """A directory with the files that the guides take for granted, see `write_guide_files`."""
    folder = tmp_path_factory.mktemp("guides") / "home"
    write_guide_files(folder, tiny_bundle)
    return folder


@pytest.fixture
def home(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files of `template` as the working directory. Rows of the index name the photos of `template`."""
    folder = tmp_path / "home"
    shutil.copytree(template, folder)
    for name in ("2024", "2025", "m64", "m32"):
        shutil.copytree(folder / "photos.edje", folder / f"{name}.edje")
    monkeypatch.chdir(folder)
    return folder
