"""Passes, one a file, in a folder a level."""
