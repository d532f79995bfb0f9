"""Statistics of a check: pure functions from measurements to findings and notes."""
