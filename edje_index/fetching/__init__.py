"""Token blocks for torch: a dataset for `DataLoader`, and a fetcher that decodes on the GPU."""
