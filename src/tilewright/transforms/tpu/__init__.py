"""From tiled functions to instructions."""
