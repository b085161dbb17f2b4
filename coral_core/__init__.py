"""Coral's knowledge: placement, allocation, capacity, routing and simulation.

Importable without prefect, ray, boto3, gurobipy or torch; each heavy library sits in one adapter file.
"""

__version__ = "0.1.0"
