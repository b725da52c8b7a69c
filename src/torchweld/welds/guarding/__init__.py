"""What a block depends on, for which calls it is valid, and whether that still holds."""
