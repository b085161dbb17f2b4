"""Baselines: same inputs, same result type as the allocation itself."""
