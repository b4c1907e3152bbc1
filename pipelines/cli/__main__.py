"""`python -m pipelines.cli`: the command line without the installed script."""

from __future__ import annotations

import sys

from pipelines.cli.main import main

sys.exit(main())
