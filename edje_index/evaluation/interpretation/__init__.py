"""Interprets stored tokens as in the appendix of the EDJE paper: by nearest words and by alignment with captions."""
