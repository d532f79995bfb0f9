"""What of a job's nodes, devices and links is odd: pure functions of what was measured."""
