"""What runs inside the engine's process, in the engine's environment: imports nothing of ours but itself."""
