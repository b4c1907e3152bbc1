"""The jobs that the commands run, such as building an index. The jobs do not depend
on the command line.
"""

from __future__ import annotations
