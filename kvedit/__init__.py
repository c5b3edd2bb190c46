"""kvedit: text compiled once, spliced into any prompt of an SGLang server at any offset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvedit.client import Client

__all__ = ["Client", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded on first use: the plugin imports this package in every process of the server, and
    # none of those needs an HTTP client.
    if name == "Client":
        from kvedit.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
