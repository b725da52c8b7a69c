"""Whether numbers are right: the rule for blocks, the check of whole models."""
