"""Writes and changes indexes."""
