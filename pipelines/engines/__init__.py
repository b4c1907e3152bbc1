"""Execution engines: ways to run independent tasks on long-lived workers."""
