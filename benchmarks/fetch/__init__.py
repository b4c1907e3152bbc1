"""Fetch throughput of the reader, its peers and the device itself, side by side.

`bench` runs the whole benchmark. `plan` decides what is measured, and `runner` measures it, each run in a process of
its own (`worker`). `summary` computes the figures, `targets` compares them with the project's targets, and `report`
and `plots` present them.
"""
