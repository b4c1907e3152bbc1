"""Compares two versions of the same tokens by token errors and by changes of the ranking."""
