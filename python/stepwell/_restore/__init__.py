"""A restore: match the target with the stored tree, read, put the result together."""
