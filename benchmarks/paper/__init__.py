"""Repeats the tables and figures of the EDJE paper, and compares the results with
the published values.
"""
