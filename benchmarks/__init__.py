"""The benchmarks that `edje-index bench` runs: workloads, compared libraries and reports."""
