import pytest

from tests.edje_index.search.indexes import build_photos


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The paths of an index and its bundle, see `build_photos`."""
    return build_photos(tmp_path_factory.mktemp("search"))
