"""Progress of a job: its events, their display, and stopping early."""
