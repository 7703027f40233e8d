"""Simulators of the machine: an oracle that imports only `spec` and `diagnostics`."""
