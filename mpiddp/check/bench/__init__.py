"""Benchmarks: of a rank, of two ranks, of all."""
