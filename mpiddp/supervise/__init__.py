"""Start a job again, in the allocation that it has, as long as that makes sense."""
