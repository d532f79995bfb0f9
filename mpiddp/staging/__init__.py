"""--stage: read the environment once for the whole job, and mirror it on each node."""
