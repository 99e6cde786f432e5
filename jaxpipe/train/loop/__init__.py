"""The training loop, and where a run resumes."""
