"""Compares two versions of the same tokens: errors of the tokens, and changes of the ranking."""
