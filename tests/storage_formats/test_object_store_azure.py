"""Azure Blob Storage: the environment can name another server, such as Azurite."""

from __future__ import annotations

import pytest

from storage_formats.errors import UsageError
from storage_formats.remote.objects import ObjectFolder
from tests.web_server import web_server

pytest.importorskip("obstore")


@pytest.mark.parametrize("variable", ["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"])
def test_a_server_without_https(monkeypatch, variable):
    with web_server() as server:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
        monkeypatch.setenv(variable, f"{server.url}/account")
        with pytest.raises(FileNotFoundError):
            ObjectFolder.open("az://photos/index").read("index.json", 100)
        assert [path for path, _ in server.requests] == [
            "/account/photos/index/index.json"
        ]


def test_a_missing_account_names_the_variable(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(
        UsageError, match=r"Account must be specified; .* AZURE_STORAGE_ACCOUNT_NAME"
    ):
        ObjectFolder.open("az://photos/index")
