"""What every package may use: configuration, errors, text, files, stderr, polling. It knows nothing of a job."""
