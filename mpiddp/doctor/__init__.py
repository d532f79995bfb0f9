"""`python -m mpiddp.doctor`: finds errors in a job script before it waits in the queue."""
