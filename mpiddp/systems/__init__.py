"""The book: what mpiddp knows of launchers, schedulers, MPI libraries and variables, as tables that all others read."""
