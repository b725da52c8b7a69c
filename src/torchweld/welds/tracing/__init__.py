"""Records the calls of modules and traces them to graphs."""
