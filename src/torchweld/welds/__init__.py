"""Finds, guards, welds and undoes blocks: the one place that changes models."""
