"""Engine that runs any schedule, forward and backward, in one loop over ticks."""
