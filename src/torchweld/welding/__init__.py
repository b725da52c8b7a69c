"""What a welded module consists of: its structure, how it is bound, and how it decides a call."""
