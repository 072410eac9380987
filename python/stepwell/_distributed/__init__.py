"""The messages between the ranks of one restore."""
