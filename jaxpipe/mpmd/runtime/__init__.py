"""Compiles and executes the instructions of a step, and moves arrays between ranks."""
