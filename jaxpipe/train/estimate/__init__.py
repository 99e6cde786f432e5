"""Memory and time of a run, by arithmetic."""
