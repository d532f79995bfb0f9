"""Restarts a failed job inside its allocation."""
