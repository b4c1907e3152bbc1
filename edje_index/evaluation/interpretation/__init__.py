"""Interprets stored tokens by nearest words and by alignment with captions, as in the appendix of the EDJE paper."""
