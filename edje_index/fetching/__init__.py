"""Fetches token blocks for PyTorch: a dataset for `DataLoader`, and a fetcher that
decodes on the GPU.
"""
