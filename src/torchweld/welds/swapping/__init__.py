"""Welds modules in place and undoes it. Nothing else changes a model."""
