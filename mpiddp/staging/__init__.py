"""--stage: the environment is read once for the whole job, and mirrored on each node."""
