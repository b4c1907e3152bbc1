"""Reads and writes files on servers: object stores, web servers and the Hugging Face
Hub.
"""
