"""Files that pack many inputs so that no input is a plain byte range: zips, compressed tars and Parquet files."""
