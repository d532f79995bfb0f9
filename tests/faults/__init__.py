"""The fault matrix: every way to end, at every moment, under every launcher, and what became of the job."""
