"""Classes of other libraries over an index. Each module needs the extra of its name."""
