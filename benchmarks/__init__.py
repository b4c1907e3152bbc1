"""The benchmarks that `edje-index bench` runs: workloads, compared libraries and reports.

This project and the compared libraries run alternately, several times, and each run has its own process. Reports give
medians and ratios.
"""
