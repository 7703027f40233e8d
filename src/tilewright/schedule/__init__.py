"""Tiling, placement and cost: decisions, kept apart from the IR they end up in."""
