"""Stage capacity: memory, roofline, network."""
