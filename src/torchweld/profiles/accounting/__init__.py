"""What the time and the memory of a step went to."""
