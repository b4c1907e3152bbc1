"""Everything that is read from or written to a server: object stores, web servers and
the Hugging Face Hub.
"""
