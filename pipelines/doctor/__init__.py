"""Checks of the machine, the installed packages and the disk, for `edje-index doctor` and for reports of benchmarks."""
