"""The `coral` command."""
