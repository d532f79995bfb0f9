"""What every package may use: configuration, errors, text, files, stderr, polling. Nothing here knows about jobs."""
