"""A schedule on a grid of ticks: its buffers, its weight prefetch and its tables."""
