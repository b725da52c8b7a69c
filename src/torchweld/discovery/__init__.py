"""Finds what can be welded: recorded calls, traced graphs, normal form, blocks."""
