"""Finds what a block depends on and for which calls it is valid, and guards that at every call."""
