"""The ownership oracle: every slot of a pool has exactly one owner. Pure; for tests and audits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def ownership_problems(
    slots: Iterable[int], owners: Mapping[str, Iterable[int]], *, max_shown: int = 5
) -> list[str]:
    """Problems of a pool whose allocatable slots are ``slots``; empty when all is well.

    owners: name of an owner (``free``, ``tree``, ``request <rid>``) -> the slots it holds. A slot
    named twice, by two owners or by one, is a problem; so is one that nobody holds, and one that
    is no slot of the pool.
    """
    expected = set(slots)
    holder: dict[int, str] = {}
    problems: list[str] = []
    for name, held in owners.items():
        twice = []
        for slot in held:
            if slot in holder:
                twice.append((slot, holder[slot]))
            holder[slot] = name
        if twice:
            shown = ", ".join(f"{slot} ({other})" for slot, other in twice[:max_shown])
            problems.append(f"{len(twice)} slots of {name} are owned already: {shown}")
    lost = sorted(expected - holder.keys())
    if lost:
        problems.append(f"{len(lost)} slots have no owner: {lost[:max_shown]}")
    strange = sorted(holder.keys() - expected)
    if strange:
        problems.append(f"{len(strange)} slots are not of this pool: {strange[:max_shown]}")
    return problems
