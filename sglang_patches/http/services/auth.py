"""Who is asking: one decision for every /kvedit route, made from the two keys of the host.

| keys of the server | no key sent      | api key | admin key |
|--------------------|------------------|---------|-----------|
| none               | local ADMIN, else CLIENT   | | |
| api key            | refused          | ADMIN   | -         |
| admin key          | CLIENT           | -       | ADMIN     |
| both               | refused          | CLIENT  | ADMIN     |

With an api key alone its holders administrate, as on the host's own ADMIN_OPTIONAL routes.
"""

from __future__ import annotations

import enum
import hmac
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvedit.errors import Forbidden
from kvedit.namespace import namespace_tag

PREFIX = "/kvedit"
# A request that passed a proxy or was sent by a web page is not the operator of this host.
_FOREIGN_HEADERS = ("origin", "forwarded", "x-forwarded-for", "x-real-ip", "via")
_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]+))(?::[0-9]+)?")


class Role(enum.Enum):
    ADMIN = "admin"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Caller:
    """A role and the namespace that the caller reads. Salts separate, they do not protect."""

    admin: bool
    cache_salt: str | None = None
    extra_key: str | None = None

    @property
    def namespace(self) -> str:
        return namespace_tag(self.cache_salt, self.extra_key, None)

    def require_admin(self, what: str) -> None:
        """Raises Forbidden unless the caller is an admin."""
        if not self.admin:
            raise Forbidden(
                f"kvedit: {what}: expected the admin key (without any key: a direct request "
                "from this host, or a server started with --kvedit-open), got an ordinary client"
            )


@dataclass(frozen=True, slots=True)
class Door:
    """The keys of the server and what an absent key means."""

    api_key: str | None
    admin_api_key: str | None
    open: bool

    def role(self, authorization: str | None, *, local: bool) -> Role | None:
        """The role of a request, or None when it must be refused with 401."""
        token = _bearer(authorization)
        if self.admin_api_key and _same(token, self.admin_api_key):
            return Role.ADMIN
        if self.api_key:
            if not _same(token, self.api_key):
                return None
            return Role.CLIENT if self.admin_api_key else Role.ADMIN
        if self.admin_api_key:
            return Role.CLIENT
        return Role.ADMIN if self.open or local else Role.CLIENT


def is_local(peer: str | None, headers: Mapping[str, str]) -> bool:
    """Whether a request came straight from a program on this host, and by a name of this host: a
    web page that lets its own name resolve to 127.0.0.1 reaches us too."""
    if peer is None or any(name in headers for name in _FOREIGN_HEADERS):
        return False
    return _is_loopback(peer) and _names_loopback(headers.get("host", ""))


def _names_loopback(authority: str) -> bool:
    """Whether a Host header is "localhost" or a loopback address, with or without a port."""
    spelled = _AUTHORITY.fullmatch(authority)
    if spelled is None:
        return False
    if spelled["name"] is not None:
        return spelled["name"].lower() == "localhost" or _is_loopback(spelled["name"])
    return _is_loopback(spelled["ipv6"])


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # exists on IPv6 addresses only
    return bool((mapped or address).is_loopback)


def decide(original: Callable[..., Any], **request: Any) -> Any:
    """AROUND ``decide_request_auth``: our paths accept either key, the route then tells them apart.

    The host's three levels cannot say "this key or that one" for one path.
    """
    ours = request["path"] == PREFIX or request["path"].startswith(PREFIX + "/")
    if not ours or request["method"] == "OPTIONS":
        return original(**request)
    from sglang.srt.utils.auth import AuthDecision

    door = Door(request["api_key"], request["admin_api_key"], open=False)
    role = door.role(request["authorization_header"], local=False)
    return AuthDecision(allowed=role is not None)


def _bearer(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _same(token: str, key: str) -> bool:
    return hmac.compare_digest(token.encode("utf-8", "replace"), key.encode("utf-8", "replace"))
