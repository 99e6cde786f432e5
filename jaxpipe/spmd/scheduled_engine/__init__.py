"""Any schedule, forward and backward, in one loop over ticks."""
