"""Measures the times of tasks, and compares them with the times that a schedule predicts."""
