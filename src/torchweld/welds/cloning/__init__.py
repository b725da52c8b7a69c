"""Clones a model: new module objects on the same weights, to run and trace instead of the model."""
