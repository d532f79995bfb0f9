"""Agents: the watchdog process beside each rank, its client in the rank, and the coordinator of all, in rank 0's."""
