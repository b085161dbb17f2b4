"""Coordinator and node agents: who serves what, started and watched over, spoken of over ZeroMQ with CURVE keys."""
