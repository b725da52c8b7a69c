"""Reads a traced graph as a chain of layers."""
