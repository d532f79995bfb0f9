"""Restarts a job in its allocation, as long as that makes sense."""
