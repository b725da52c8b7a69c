"""Recorded calls and traced graphs of modules."""
