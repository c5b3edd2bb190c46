"""What proves that an earlier turn is the caller's.

Texts and names are no proof: anybody may ask the same question, name a conversation alike, or
have read the same greedy reply elsewhere. What counts is set when the server starts
(``kvedit.config.Trust``):

    tokens    a token that this server issued for the conversation; in a namespace with a salt,
              which is one trust domain, also a reply that the request goes on with
    replies   such a reply in any namespace: a server with a single user
    names     also the name of the conversation: a gateway sets it, no client can

A name alone narrows: it says among which turns the caller's are looked for. It takes no rival
away: whoever leaves it out, adds it or sends another one finds nothing more (see ``rivals``).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvedit.config import Trust
from kvedit.request.options import Options

Scope = tuple[str, str]  # (namespace tag, name of the conversation or "")
MAX_ISSUED = 65_536  # tokens in force; the one unused longest is forgotten, and proves nothing

ASK_FOR_TOKEN = 'send "conversation": true and, from the next turn on, the token in its report'
CHOICES = (
    f"to prove that a conversation is yours, {ASK_FOR_TOKEN}; "
    "or one cache_salt per end user, then going on with the reply proves it; "
    "or start the server with --kvedit-trust replies (a single user) or names (a gateway sets them)"
)
NEEDS_REPLY = (
    "expected a prompt that goes on with a reply which this conversation alone was given; "
    f"else {ASK_FOR_TOKEN}"
)
EXPIRED = f"the token is older than the last flush or change of weights: {ASK_FOR_TOKEN}"


class TokenBook:
    """Digests of the tokens that were issued; a token itself never comes here.

    One book per rank, fed with the same calls in the same order.
    """

    def __init__(self) -> None:
        self._epochs: OrderedDict[Scope, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._epochs)

    def take_in(self, options: Options, namespace: str, epoch: int) -> None:
        """Keep the digest of the token that a request asked for, and got."""
        proof = options.sealed.proof
        if proof is None or not options.sealed.is_issued:
            return
        self._epochs[namespace, proof] = epoch
        self._epochs.move_to_end((namespace, proof))
        while len(self._epochs) > MAX_ISSUED:
            self._epochs.popitem(last=False)

    def clear(self) -> None:
        """As after a restart: every token is a name, until its client asks for a new one."""
        self._epochs.clear()

    def epoch_of(self, scope: Scope) -> int | None:
        """The weight epoch for which the token was issued in this namespace; None: it was not."""
        epoch = self._epochs.get(scope)
        if epoch is not None:
            self._epochs.move_to_end(scope)
        return epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a request may call its own.

    scope       where its turns are looked for and kept
    is_proven   every turn of the scope is the caller's
    by_reply    a turn of the scope is, if the request goes on with its reply
    is_expired  it holds a token of an earlier epoch: of its turns nothing is left
    hint        what would help where nothing is proven
    """

    scope: Scope
    is_proven: bool = False
    by_reply: bool = False
    is_expired: bool = False
    hint: str = ""

    @property
    def can_return(self) -> bool:
        """Whether a turn kept under this claim can be found again by what a request proves.
        (One with public fields alone is found without.)"""
        return self.is_proven or self.by_reply


def claim_of(
    options: Options, namespace: str, *, has_salt: bool, trust: Trust, book: TokenBook, epoch: int
) -> Claim:
    """What a request with ``options`` proves."""
    name = options.conversation if isinstance(options.conversation, str) else ""
    proof = options.sealed.proof
    issued = None if proof is None else book.epoch_of((namespace, proof))
    is_expired = issued is not None and issued != epoch
    by_reply = has_salt or trust == "replies"
    return Claim(
        scope=(namespace, name),
        is_proven=issued == epoch or (trust == "names" and name != ""),
        by_reply=by_reply,
        is_expired=is_expired,
        hint=EXPIRED if is_expired else NEEDS_REPLY if by_reply else CHOICES,
    )
