"""Co-simulation: the RTL, built by Verilator, beside the functional and the cycle simulator."""
