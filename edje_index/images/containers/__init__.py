"""Reads images from zips, compressed tars and Parquet files."""
