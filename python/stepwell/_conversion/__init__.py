"""Conversions: a checkpoint written in another format, in constant memory."""
