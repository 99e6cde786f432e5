"""Defines the instructions of an MPMD program, and the primitives of stage marks and loops."""
