"""The stand-in's utilities."""
