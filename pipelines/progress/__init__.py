"""Progress events of jobs, the display of these events, and stopping a job early."""
