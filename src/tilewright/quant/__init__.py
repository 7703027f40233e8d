"""Quantisation: calibration, integer parameters, reference semantics, comparison."""
