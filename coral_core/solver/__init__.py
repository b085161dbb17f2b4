"""Solver-neutral integer programs and one adapter per solver."""
