"""HTTP to this machine and to a cloud's metadata service: never by a proxy, whatever the environment names for the world outside."""

from __future__ import annotations

import urllib.request
from typing import Final

open_directly: Final = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""As `urllib.request.urlopen`. A proxy would be shown the admin token, and has another machine's metadata."""
