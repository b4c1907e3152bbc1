"""Reads image files and converts them to the input of the vision tower."""
