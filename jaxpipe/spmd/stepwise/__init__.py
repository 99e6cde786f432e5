"""The circular loop driven by hand, one iteration at a time."""
