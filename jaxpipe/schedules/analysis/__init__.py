"""Times and memory of a schedule, and the search for the fastest one that fits."""
