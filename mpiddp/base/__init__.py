"""What every package may use: configuration, errors, records of ranks, text, files, stderr, polling, termination."""
