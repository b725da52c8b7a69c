"""Guesses about what code launches, checked by looking: `tw.expect`."""
