"""Where the ranks of a job are: the stacks of all ranks, grouped, and the outliers."""
