"""The optimizer, and which weights it decays or steers."""
