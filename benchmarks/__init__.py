"""Workloads, peers and reports; reached through `edje-index bench ...`.

Each subject and each peer runs in a process of its own, in turn, several times; reports give medians and ratios.
"""
