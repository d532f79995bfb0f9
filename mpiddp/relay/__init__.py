"""A process that passes a rank's output on: to the terminal, to a log, folded with that of other ranks."""
