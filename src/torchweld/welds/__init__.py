"""Finds, guards, welds and undoes blocks: the only package that changes models."""
