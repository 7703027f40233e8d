"""The chip in SystemVerilog: hand-written modules (`*.sv`) and the package made from the tables."""
