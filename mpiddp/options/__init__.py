"""The command line: its options, their values, and its help."""
