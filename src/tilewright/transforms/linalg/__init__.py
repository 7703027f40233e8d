"""Passes that make and change the linalg level."""
