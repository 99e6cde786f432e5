"""What a run records and shows: metrics, progress, profiles."""
