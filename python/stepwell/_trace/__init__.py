"""Traces of runs: digests of the state after a save, and whether a resumed run has the same."""
