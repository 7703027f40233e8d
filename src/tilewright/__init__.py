"""tilewright: compile trained models for your own systolic-array chip, and know why."""

__version__ = "0.1.0"
