import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from edje_index.fetching.token_dataset import TokenDataset
from edje_index.models.devices import to_bf16_array
from storage_formats.format.layout import IndexSpec
from tests.conftest import same_bits, write_random_index

SPEC = IndexSpec(37, 8, (4, 32), 4, precisions=("bf16", "fp8"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("index")
    return root, write_random_index(root, SPEC, failed=frozenset({5}))


def test_items_are_blocks(built):
    root, expected = built
    dataset = TokenDataset(root)
    assert len(dataset) == 37
    assert dataset[3].dtype == torch.bfloat16
    assert same_bits(
        to_bf16_array(torch.stack([dataset[3], dataset[-1]])), expected[[3, 36]]
    )
    assert torch.isnan(dataset[5]).all()
    for row in (37, -38):
        with pytest.raises(IndexError, match=f"item {row} is out of range"):
            dataset[row]


@pytest.mark.parametrize(
    "start", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_a_loader_reads_in_any_process(built, start):
    root, expected = built
    dataset = TokenDataset(root, "bf16", "auto")
    # the parent's store is open when workers start
    dataset[0]
    workers = 0 if start is None else 2
    loader = DataLoader(
        dataset, batch_size=8, num_workers=workers, multiprocessing_context=start
    )
    assert same_bits(to_bf16_array(torch.cat(list(loader))), expected)


def test_it_pickles_as_its_snapshot(built):
    dataset = pickle.loads(pickle.dumps(TokenDataset(built[0], "fp8", "portable")))
    assert len(pickle.dumps(dataset)) < 4000
    assert same_bits(
        to_bf16_array(torch.stack(dataset.__getitems__([1, 1]))),
        np.stack([to_bf16_array(dataset[1])] * 2),
    )
