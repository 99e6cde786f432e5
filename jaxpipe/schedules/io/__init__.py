"""Schedules and timelines as text, SVG, Perfetto traces and CSV."""
