"""Prefect flows: the order of the work, nothing else. Importing the package sets the environment's defaults."""

from flows.settings import set_environment_defaults

set_environment_defaults()
