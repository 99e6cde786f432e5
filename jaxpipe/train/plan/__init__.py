"""Derives a run's setup from its config and devices, before anything is compiled."""
