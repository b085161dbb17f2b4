"""Traces, length statistics, generators and demand."""
