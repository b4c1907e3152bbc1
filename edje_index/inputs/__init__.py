"""Finds and reads the bytes of inputs: files, members of archives, rows of Parquet
files, and files on servers.
"""
