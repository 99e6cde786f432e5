"""Measured times of tasks, beside those that a schedule predicts."""
