"""Run the command line as `python -m pipelines.cli`, without the installed
`edje-index` script.
"""

from __future__ import annotations

import sys

from pipelines.cli.main import main

sys.exit(main())
