"""Recognises a module's result as a chain of layers."""
