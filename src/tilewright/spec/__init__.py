"""The tables everything else is generated from or checked against."""
