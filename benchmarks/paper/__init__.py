"""Repeats the tables and figures of the EDJE paper and prints the figures of the paper beside its own."""
