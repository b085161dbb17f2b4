"""Routing and admission decisions, pure: the gateway and the simulator call the very same functions.

The functions work on small arrays that their caller owns and use nothing that a compiler for numerical Python lacks,
so the simulator's kernel compiles them and the gateway runs them as they are.
"""
