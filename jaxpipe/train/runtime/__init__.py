"""Processes, signals, folders and files of a run."""
