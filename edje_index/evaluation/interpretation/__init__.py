"""Interprets stored tokens as in the EDJE paper: by nearest words, attention, and alignment with captions."""
