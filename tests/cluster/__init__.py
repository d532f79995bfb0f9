"""A real Slurm cluster of three nodes on this machine, for the tests."""

from .cluster import Cluster, missing_components

__all__ = ["Cluster", "missing_components"]
