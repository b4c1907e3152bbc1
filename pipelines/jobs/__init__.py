"""The jobs that the commands run, such as building an index. They do not depend on the command line."""

from __future__ import annotations
