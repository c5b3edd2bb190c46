"""Red when SGLang adds, renames or removes a server argument, or when a table contradicts another.

Own process: importing sglang on a host without a GPU needs the stand-in in front.
"""

from __future__ import annotations

import msgspec
import pytest

from sglang_patches.cpu import prepare
from sglang_patches.host.server_args import (
    CHECK_RESOLVED,
    INERT,
    IRRELEVANT,
    REFUSED,
    TESTED,
    UNTESTED,
)

pytestmark = pytest.mark.own_process

TABLES = {
    "REFUSED": frozenset(REFUSED),
    "TESTED": frozenset(TESTED),
    "UNTESTED": UNTESTED,
    "INERT": INERT,
    "IRRELEVANT": IRRELEVANT,
}


@pytest.fixture(scope="module")
def host_fields() -> set[str]:
    prepare()
    from sglang.srt.server_args import ServerArgs

    return {field.name for field in msgspec.structs.fields(ServerArgs)}


def test_every_host_field_is_classified(host_fields: set[str]) -> None:
    classified = frozenset().union(*TABLES.values())
    assert host_fields - classified == set(), "new in the host: look at them and classify them"
    assert classified - host_fields == set(), "gone from the host: remove them"


def test_no_field_stands_in_two_tables() -> None:
    names = [name for table in TABLES.values() for name in table]
    assert len(names) == len(set(names))


def test_resolved_fields_are_limited_to_values() -> None:
    assert all(TESTED[name] is not None for name in CHECK_RESOLVED)
