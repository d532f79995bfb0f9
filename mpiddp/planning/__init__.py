"""Decisions: pure functions from the discovery of all ranks to plans and problems."""
