"""Reads images on web servers, on the Hugging Face Hub and in object stores. Needs the extra `[remote]`."""
