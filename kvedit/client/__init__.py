"""The Python client of a server with kvedit.

Called by: users, as `kvedit.Client`; the commands, the demo and `kvedit.lang`.
May touch: HTTP, or an engine in the same process.
"""

from __future__ import annotations

from kvedit.client.client import Client

__all__ = ["Client"]
