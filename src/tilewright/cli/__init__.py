"""The `tilewright` command. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

from tilewright.cli.command import main

__all__ = ["main"]
