from __future__ import annotations

import pytest

from pipelines.jobs.train_stages import watched
from pipelines.progress.events import Progress
from pipelines.progress.stopping import JobStopped


def test_a_stage_reports_its_progress():
    events = []
    progress = watched("reading", events.append, lambda: False)
    progress(3, 1000)
    assert events == [Progress("reading", 3, 1000)]


def test_a_stage_stops_when_it_is_asked_to():
    asked = [False]
    progress = watched("reading", lambda event: None, lambda: asked[0])
    progress(0, 10)
    asked[0] = True
    with pytest.raises(JobStopped, match="while reading: 3 of 10"):
        progress(3, 10)
