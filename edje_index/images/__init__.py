"""Decodes image files and video clips, and converts them to the input of the vision
tower.
"""
