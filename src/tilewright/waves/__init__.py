"""Waveforms of the chip: measured times of instructions, and where a run leaves its program."""
