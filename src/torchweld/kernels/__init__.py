"""Backends: one block, several implementations."""
