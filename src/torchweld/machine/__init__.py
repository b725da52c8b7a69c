"""What this machine is, what was built for it, and how fast it is at best."""
