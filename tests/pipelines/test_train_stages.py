from __future__ import annotations

import itertools

import pytest

from pipelines.jobs.train_stages import watched
from pipelines.progress.stopping import JobStopped


def test_a_stage_is_shown_every_five_seconds():
    shown = []
    clock = itertools.count(step=2).__next__  # seconds, at every look
    progress = watched("reading", lambda event: shown.append(event.name), lambda: False, lambda: float(clock()))
    for done in range(6):
        progress(done, 1000)
    assert shown[0] == "reading"
    assert len(shown) == 3
    assert shown[1].startswith("reading, ")
    assert shown[1].endswith(" of 1,000")


def test_a_stage_stops_when_it_is_asked_to():
    asked = [False]
    progress = watched("reading", lambda event: None, lambda: asked[0])
    progress(0, 10)
    asked[0] = True
    with pytest.raises(JobStopped, match="while reading: 3 of 10"):
        progress(3, 10)
