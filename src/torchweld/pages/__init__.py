"""Report pages: one HTML file that needs nothing else. Records in, HTML out, and back."""
