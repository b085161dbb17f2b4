"""Prefect flows: the order of the work, nothing else."""
