"""A rank's output: redirected, forwarded to the terminal and to a log, folded with that of other ranks."""
