"""The benchmarks that the commands of `edje-index bench` run."""
