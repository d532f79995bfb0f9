"""The script runs, stops, fails, ends; and its output."""
