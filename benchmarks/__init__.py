"""The benchmarks that `edje-index bench` runs: workloads, peers and reports.

Subjects and peers take turns, several times, each run in a process of its own. Reports give medians and ratios.
"""
