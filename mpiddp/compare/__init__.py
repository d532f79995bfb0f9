"""What of a job's nodes, devices and ways between them is odd: pure functions of figures that were measured."""
