"""Data and helpers that every room uses. They import nothing of torchweld but each other."""
