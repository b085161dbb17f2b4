"""What everything talks about: frozen dataclasses and protocols, no I/O."""
