"""A second model of the same structure on the same weights, to run and trace."""
