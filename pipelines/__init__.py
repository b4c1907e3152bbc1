"""The application: sources of images, the build plan, execution engines, jobs, and the command line."""

from __future__ import annotations
