"""Serving: the OpenAI-compatible gateway, and the control plane between coordinator and node agents."""
