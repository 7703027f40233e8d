"""Execution of the linalg and affine levels: an oracle that runs the IR as it is written."""
