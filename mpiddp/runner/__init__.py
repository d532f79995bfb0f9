"""The script runs, stops, fails, and ends."""
