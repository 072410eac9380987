"""What the ranks of one restore send each other."""
