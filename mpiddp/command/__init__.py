"""The command line: its options, its help, and what is said where it is wrong."""
