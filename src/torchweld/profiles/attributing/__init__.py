"""Which module and which phase each recorded op belongs to, and what kind of op it is."""
