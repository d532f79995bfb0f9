"""Odd scripts: the same under mpiddp as under plain Python, or said where they differ and why."""
