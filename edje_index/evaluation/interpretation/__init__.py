"""What stored tokens mean: their nearest words, and their alignment with captions, as in the paper's appendix."""
