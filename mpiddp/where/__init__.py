"""Where the ranks of a job are: their stacks, merged, and which of them is odd."""
