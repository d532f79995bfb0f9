"""CPython's own tests, in a rank and in plain Python."""
