"""Where the ranks of a job are: stacks of all ranks, grouped, and which ranks are odd."""
