"""Passes from the float graph to the quantised one, and on it."""
