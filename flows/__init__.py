"""Prefect flows: the order of the work, nothing else.

Importing the package sets the environment's defaults, and has expected failures logged without a traceback.
"""

from flows.expected_errors import leave_out_tracebacks
from flows.settings import set_environment_defaults

set_environment_defaults()
leave_out_tracebacks()
