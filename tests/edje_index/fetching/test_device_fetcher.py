import numpy as np
import pytest
import torch

from edje_index.errors import ModelError
from edje_index.fetching.device_fetcher import DeviceFetcher, decode_records_torch
from edje_index.models.devices import to_bf16_array
from storage_formats import TokenStore, codec, precisions
from storage_formats.format.layout import IndexSpec
from tests.conftest import same_bits, write_random_index
from tests.storage_formats import codec_reference as reference

SPEC = IndexSpec(50, 16, (4, 32), 4, precisions=precisions())
REFERENCE = [name for name in precisions() if name != "bf16"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("index")
    write_random_index(root, SPEC, failed=frozenset({3}))
    return root


def decoded(name, records, shape):
    return to_bf16_array(decode_records_torch(name, torch.from_numpy(records), shape))


@pytest.mark.parametrize("name", REFERENCE)
def test_every_code_under_every_scale_decodes_to_the_bits_of_the_reference(name):
    records, shape = reference.every_code(name)
    assert same_bits(
        decoded(name, records, shape), reference.decode(codec(name, shape), records)
    )


@pytest.mark.parametrize("name", precisions())
@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_fetch_equals_the_store(built, name, buffer_bytes):
    store = TokenStore.open(built, name)
    fetcher = DeviceFetcher(store, "cpu", buffer_bytes)
    for ids in ([], [7], np.random.default_rng(0).integers(0, 50, 20)):
        assert same_bits(to_bf16_array(fetcher.fetch(ids)), store.fetch(ids))


def test_an_absent_device_is_refused(built):
    with pytest.raises(ModelError):
        DeviceFetcher(TokenStore.open(built), "cuda:99")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", precisions())
def test_a_gpu_gives_the_same_bits(built, name):
    store = TokenStore.open(built, name)
    fetcher = DeviceFetcher(store, "cuda", 4 * store.record_bytes)
    ids = np.random.default_rng(0).integers(0, 50, 120)
    for _ in range(3):
        assert same_bits(to_bf16_array(fetcher.fetch(ids)), store.fetch(ids))
    if name != "bf16":
        records, shape = reference.every_code(name)
        blocks = decode_records_torch(name, torch.from_numpy(records).cuda(), shape)
        assert same_bits(
            to_bf16_array(blocks), reference.decode(codec(name, shape), records)
        )
