"""Sweeps over a target's parameters: cycles of real models against the area of the chip."""
