"""The skills service of one HTTP process: what the routes and the offline client both call."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec
from msgspec import UNSET

from kvedit.checks import check_name
from kvedit.config import Config
from kvedit.errors import BadRequest, Conflict, Forbidden, KvEditError, NotFound, Unavailable
from kvedit.namespace import SHARED, namespace_tag
from kvedit.skills.declaration import SkillDeclaration
from kvedit.skills.quota import QuotaBook
from kvedit.wire.commands import (
    ListSkills,
    ReadStatus,
    ReadTree,
    RegisterSkill,
    RemoveSkill,
    RunAudit,
    RunTestOperation,
    ShowSkill,
)
from kvedit.wire.views import (
    AuditView,
    DeclaredView,
    RemovedView,
    SkillsView,
    SkillView,
    StatusView,
    TreeView,
)
from sglang_patches import faults
from sglang_patches.host.protocols import TokenizerManager
from sglang_patches.http.services import compile_request, rpc, skill_text
from sglang_patches.http.services.auth import Caller
from sglang_patches.http.services.body import Registration, parse_registration
from sglang_patches.http.services.field_service import FieldService
from sglang_patches.http.services.mirror import Mirror
from sglang_patches.http.services.recompile import Recompiler
from sglang_patches.http.services.report_ring import ReportRing

BACKEND = "kvedit"


class SkillService:
    """Holds no skills: the registry lives in the scheduler, where the cache is."""

    def __init__(self, tokenizer_manager: TokenizerManager, config: Config) -> None:
        self.config = config
        self.is_used = False  # whether somebody ever wanted a skill or a field here
        self.reports = ReportRing(config.ring_size)
        self._manager = tokenizer_manager
        # Names the skills' own tree namespace. It reaches the scheduler in commands only: server
        # arguments and environment are readable by clients.
        self._secret = secrets.token_hex(32)
        self.recompiler = Recompiler(tokenizer_manager, self._secret)
        self._mirror = Mirror(tokenizer_manager)
        self.fields = FieldService(tokenizer_manager)
        self._quota = QuotaBook(
            max_skills=config.client_max_skills,
            max_tokens=config.client_max_tokens,
            rate_per_minute=config.client_rate_per_minute,
            clock=time.monotonic,
        )
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[SkillView]] = set()

    async def register(self, body: Any, caller: Caller) -> SkillView:
        """Register a skill and wait until it is ready. Returns its view.

        Goes on when the caller leaves. Raises BadRequest, Forbidden, Conflict, QuotaExceeded,
        PinBudgetExceeded, Unavailable.
        """
        wanted = parse_registration(body)
        _check_rights(wanted, caller, self.config)
        self.is_used = True
        prefix = skill_text.compile_prefix(self._manager.tokenizer)
        ids = await skill_text.skill_ids(
            self._manager, wanted.text, wanted.input_ids, num_prefix=len(prefix)
        )
        namespace = (
            SHARED if wanted.shared else namespace_tag(wanted.cache_salt, wanted.extra_key, None)
        )
        task = asyncio.create_task(self._register(wanted, namespace, ids, prefix, caller))
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def declare(self, body: Any, caller: Caller, chat: Callable[[], Any]) -> DeclaredView:
        """Declare a field (see :class:`FieldService`)."""
        caller.require_admin("fields")
        self.is_used = True
        return await self.fields.declare(body, caller, chat)

    async def listed(self, caller: Caller, *, everything: bool = False) -> SkillsView:
        """Views of the caller's namespace and of the shared skills; of all for an admin."""
        if everything:
            caller.require_admin("all")
        command = ListSkills(namespace=caller.namespace, everything=everything)
        return await self._mirror.read(command)

    async def show(self, name: str, caller: Caller) -> SkillView:
        """The view of a skill of the caller's namespace, else of the shared one. Or NotFound."""
        check_name(name)
        return await self._mirror.read(ShowSkill(name=name, namespace=caller.namespace))

    async def remove(
        self, name: str, caller: Caller, *, shared: bool = False, purge: bool = False
    ) -> RemovedView:
        """Retire a skill (``purge``: drop it and its retired forms).

        Returns its last view and how many forms were dropped; a dropped one's state is "purged".
        """
        check_name(name)
        if shared or not _may_write(caller.cache_salt, caller, self.config):
            caller.require_admin("remove")
        namespace = SHARED if shared else caller.namespace
        command = RemoveSkill(name=name, namespace=namespace, purge=purge)
        view = await rpc.call(self._manager, command)
        self._mirror.forget()
        self._quota.release(_account(caller.cache_salt), _entry(namespace, name))
        return view

    async def status(self, caller: Caller) -> StatusView:
        """Counts of skills, counters, the pool and, for an admin, where events come out."""
        view = msgspec.structs.replace(
            await self._mirror.read(ReadStatus()),
            exact=self.config.exact,
            reports=self.config.reports,
        )
        return view if caller.admin else msgspec.structs.replace(view, events=UNSET)

    async def tree(self, caller: Caller) -> TreeView:
        """The segments and their places in the cache (admin)."""
        caller.require_admin("tree")
        return await rpc.call(self._manager, ReadTree())

    async def audit(self, caller: Caller) -> AuditView:
        """Whether every slot of the pool has exactly one owner (admin)."""
        caller.require_admin("audit")
        return await rpc.call(self._manager, RunAudit())

    def request_report(self, request_id: str, caller: Caller) -> dict[str, Any]:
        """What a finished or streaming request of the caller's namespace took from the cache."""
        return self.reports.get(request_id, caller.namespace)

    async def testing(self, body: Any, caller: Caller) -> dict[str, Any]:
        """Make a hook of this process or of the scheduler's fail ({"op": "fault"}), or what else
        the scheduler does for tests. Only where KVEDIT_TESTING=1 (admin)."""
        caller.require_admin("testing")
        if not self.config.testing:
            raise NotFound("kvedit: testing: expected a server started with KVEDIT_TESTING=1")
        if not isinstance(body, dict) or "op" not in body:
            raise BadRequest('kvedit: testing: expected an object with "op", got another body')
        if body["op"] == "fault" and faults.is_taken(body, faults.HTTP_HOOKS):
            return {}
        arguments = {key: value for key, value in body.items() if key != "op"}
        command = RunTestOperation(operation=str(body["op"]), arguments=arguments)
        return await rpc.call(self._manager, command)

    async def _register(
        self,
        wanted: Registration,
        namespace: str,
        ids: list[int],
        prefix: list[int],
        caller: Caller,
    ) -> SkillView:
        lock = self._locks.setdefault((namespace, wanted.name), asyncio.Lock())
        async with lock:  # the second of two racing registrations sees the first one's outcome
            if caller.admin:
                return await self._compile(wanted, namespace, ids, prefix)
            account = _account(wanted.cache_salt)
            reservation = self._quota.admit(account, _entry(namespace, wanted.name), len(ids))
            try:
                return await self._compile(wanted, namespace, ids, prefix)
            except KvEditError:
                self._quota.cancel(reservation)
                raise

    async def _compile(
        self, wanted: Registration, namespace: str, ids: list[int], prefix: list[int]
    ) -> SkillView:
        rid = compile_request.new_rid()
        skill = SkillDeclaration(
            name=wanted.name,
            namespace=namespace,
            token_ids=array("q", ids),
            compile_prefix=array("q", prefix),
            seam=wanted.seam,
            pin=wanted.pin,
            replace=wanted.replace,
            memory=wanted.memory,
        )
        command = RegisterSkill(skill=skill, rid=rid, secret=self._secret)
        answer = await rpc.call(self._manager, command)
        self._mirror.forget()
        if answer.outcome == "exists":
            return _settled(answer.skill)
        await compile_request.run(self._manager, rid, prefix, ids)
        view = await self._compiled(wanted, namespace)
        self._mirror.forget()
        return _settled(view)

    async def _compiled(self, wanted: Registration, namespace: str) -> SkillView:
        """The view of a skill after its compile. Raises Conflict when it was removed meanwhile."""
        removed = Conflict(
            f"kvedit: skill {wanted.name!r}: expected it to stay, got a removal while it compiled"
        )
        try:
            view = await rpc.call(self._manager, ShowSkill(name=wanted.name, namespace=namespace))
        except NotFound:
            raise removed from None
        if view.shared != wanted.shared:  # the look-up fell through to the shared skill
            raise removed
        return view

    def _finished(self, task: asyncio.Task[SkillView]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: the caller may have left


def is_enabled(tokenizer_manager: TokenizerManager) -> bool:
    """Whether this server runs with our cache; without it the plugin does nothing."""
    return bool(tokenizer_manager.server_args.radix_cache_backend == BACKEND)


_services: WeakKeyDictionary[Any, SkillService] = WeakKeyDictionary()


def service_of(tokenizer_manager: TokenizerManager) -> SkillService:
    """The one service of a tokenizer manager, made at the first call."""
    service = _services.get(tokenizer_manager)
    if service is None:
        service = SkillService(tokenizer_manager, Config.from_env())
        _services[tokenizer_manager] = service
    return service


def _settled(view: SkillView) -> SkillView:
    """The view of a skill whose compile came to an end. Raises Unavailable when it failed.

    It may be evicted already: then it is registered, and recompiled when a prompt needs it.
    """
    if view.state == "failed":
        raise Unavailable(
            f"kvedit: skill {view.name!r}: expected a finished compile, got: {view.reason}"
        )
    return view


def _account(cache_salt: str | None) -> str:
    """Quotas count per salt: extra keys are free to invent."""
    return namespace_tag(cache_salt, None, None)


def _entry(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"


def _may_write(cache_salt: str | None, caller: Caller, config: Config) -> bool:
    return caller.admin or (config.client_skills and cache_salt is not None)


def _check_rights(wanted: Registration, caller: Caller, config: Config) -> None:
    if caller.admin:
        return
    if not config.client_skills:
        caller.require_admin("register")
    problems = [
        f"{field}: expected {expected}"
        for field, expected, bad in (
            ("namespace.cache_salt", "a salt of your own", wanted.cache_salt is None),
            ("shared", "false", wanted.shared),
            ("pin", "false", wanted.pin),
        )
        if bad
    ]
    if problems:
        raise Forbidden(f"kvedit: register as an ordinary client: {'; '.join(problems)}")
