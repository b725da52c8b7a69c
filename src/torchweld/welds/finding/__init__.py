"""Finds the blocks of a model: `tw.find`."""
