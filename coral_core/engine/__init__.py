"""The engine: launch plans, engine processes and their state, and what runs inside them (`plugin`)."""
