"""--stage: what a start opens of its environment is read once for the whole job, and lies on each node."""
