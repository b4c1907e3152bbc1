"""Measures fetch throughput of this project's reader, of other libraries ("compared libraries") and of the disk.

`bench` runs the whole benchmark. `plan` decides what is measured, and `runner` measures it. Each run has its own
process (`worker`). `summary` computes medians and ratios, `targets` compares them with the project's targets, and
`report` and `plots` present the results.
"""
