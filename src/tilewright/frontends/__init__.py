"""Readers of models: one package for each source format."""
