"""Chip stress tests: random programs, differential runs, shrinking, planted faults."""
