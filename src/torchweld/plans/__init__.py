"""Plans: what to weld, measured and verified; and carrying them out."""
