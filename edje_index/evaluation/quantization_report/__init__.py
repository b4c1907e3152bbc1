"""Compares two precisions of the same tokens, by the errors of the tokens and by the changes of rankings."""
