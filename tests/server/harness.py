"""A real server and short ways to talk to it. Every test under tests/server goes through here."""

from __future__ import annotations

import itertools
import json
import random
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvedit.workbench.server_process import ServerProcess
from tests.report_schema import checked

TESTING_ENV = {
    "KVEDIT_TESTING": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "OMP_NUM_THREADS": "1",
    # Short skills keep the tests short; a prompt that repeats a skill's head still finds no buyer.
    "KVEDIT_BOUNDARY_TOKENS": "16",
}


@dataclass(frozen=True)
class ServerConfig:
    """One server: flags besides the model, and environment."""

    page_size: int = 1
    chunk: int = 2048
    overlap: bool = True
    pool: int = 16_000
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    model: str = ""  # a model folder; empty: the default model
    api_key: str | None = None  # what the harness sends to the host's own routes
    admin_key: str | None = None  # and to the admin ones

    def argv(self, model_dir: Path) -> list[str]:
        argv = ["--model-path", self.model or str(model_dir)]
        argv += ["--page-size", str(self.page_size), "--chunked-prefill-size", str(self.chunk)]
        argv += ["--max-total-tokens", str(self.pool), "--random-seed", "1"]
        if not self.overlap:
            argv.append("--disable-overlap-schedule")
        return [*argv, *self.flags]


# Pairwise cover of page x chunk x overlap; the small pool drives eviction and retraction.
BASE = ServerConfig()
SMALL_CHUNK = ServerConfig(chunk=128, overlap=False)
PAGED = ServerConfig(page_size=16, overlap=False)
PAGED_SMALL_CHUNK = ServerConfig(page_size=16, chunk=128, overlap=True)
SMALL_POOL = ServerConfig(chunk=512, pool=3_000)
# Both keys, clients with skills of their own and small quotas; messages between the processes
# are msgpack here, where everything else runs with the host's default, pickle.
API_KEY, ADMIN_KEY = "key-of-the-clients", "key-of-the-admin"
RIGHTS = ServerConfig(
    flags=("--api-key", API_KEY, "--admin-api-key", ADMIN_KEY, "--kvedit-client-skills"),
    env=(
        ("SGLANG_USE_PICKLE_IPC", "0"),
        ("KVEDIT_CLIENT_MAX_SKILLS", "3"),
        ("KVEDIT_CLIENT_MAX_TOKENS", "600"),
        ("KVEDIT_CLIENT_RATE", "5"),
    ),
    api_key=API_KEY,
    admin_key=ADMIN_KEY,
)
STOCK = ServerConfig(flags=("--stock",))


class HttpError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:500]}")
        self.status = status
        self.body = body

    @property
    def message(self) -> str:
        try:
            content = json.loads(self.body)
        except ValueError:
            return self.body
        if not isinstance(content, dict):
            return self.body
        inner = content["error"] if isinstance(content.get("error"), dict) else content
        return str(inner.get("message", self.body))


@dataclass
class Answer:
    """One /generate answer."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    report: dict[str, Any]
    meta: dict[str, Any]

    @property
    def split(self) -> tuple[int, int, int, int]:
        r = self.report
        return r["exact"], r["composed"], r["derived"], r["computed"]

    @property
    def top_logprobs(self) -> list[Any]:
        return [[tuple(x[:2]) for x in step] for step in self.meta["output_top_logprobs"]]


@dataclass
class Server:
    """Talks to one running server."""

    url: str
    page_size: int = 1
    log_path: Path = Path()
    api_key: str | None = None
    admin_key: str | None = None

    def authorization(self, path: str) -> dict[str, str]:
        """The host's admin key opens admin routes only, its API key all others."""
        is_admin = path.startswith(("/kvedit", "/flush_cache"))
        key = self.admin_key if is_admin else self.api_key
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Any:
        data = (
            None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("content-type", "application/json")
        for name, value in (self.authorization(path) | (headers or {})).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                raw = response.read()
        except urllib.error.HTTPError as error:
            raise HttpError(error.code, error.read().decode(errors="replace")) from None
        try:
            return json.loads(raw)
        except ValueError:
            return raw.decode(errors="replace")

    def status_of(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """(status, answer); the text of an error answer is its message where it has one."""
        try:
            return 200, self.call(method, path, body, headers)
        except HttpError as error:
            return error.status, error.message

    def add_skill(self, name: str, ids: list[int], **fields: Any) -> dict[str, Any]:
        view: dict[str, Any] = self.call(
            "POST", "/kvedit/skills", {"name": name, "input_ids": ids, **fields}
        )
        return view

    def generate(
        self,
        ids: list[int],
        *,
        num_new: int = 1,
        kvedit: Any = None,
        top: int = 0,
        **fields: Any,
    ) -> Answer:
        """Greedy tokens for a prompt of ids. ``top`` > 0 returns that many logprobs a step."""
        params: dict[str, Any] = {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}
        params.update(fields.pop("sampling_params", {}))
        if kvedit is not None:
            params["custom_params"] = {"kvedit": kvedit}
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": params, **fields}
        if top:
            body |= {"return_logprob": True, "top_logprobs_num": top}
        return as_answer(self.call("POST", "/generate", body))

    def flush(self) -> None:
        self.call("POST", "/flush_cache")

    def status(self) -> dict[str, Any]:
        out: dict[str, Any] = self.call("GET", "/kvedit/status")
        return out

    def audit(self) -> list[str]:
        problems: list[str] = self.call("GET", "/kvedit/audit")["problems"]
        return problems

    def testing(self, **command: Any) -> dict[str, Any]:
        out: dict[str, Any] = self.call("POST", "/kvedit/testing", command)
        return out

    def fault(self, hook: str, times: int = 1) -> None:
        self.testing(op="fault", hook=hook, times=times)

    def healthy(self) -> bool:
        """The server answers a plain request it cannot have seen, and its slots add up."""
        answer = self.generate([random.randrange(100, 40_000) for _ in range(8)])
        return len(answer.token_ids) == 1 and not self.audit()


def as_answer(raw: dict[str, Any]) -> Answer:
    meta = raw["meta_info"]
    report = [checked(one) for one in meta.get("kvedit") or ()] or [{}]
    return Answer(
        text=raw["text"],
        token_ids=raw["output_ids"],
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        report=report[0],
        meta=meta,
    )


_seed_of_first_id: dict[int, str] = {}


def random_ids(seed: Any, num_tokens: int, low: int = 1_000, high: int = 40_000) -> list[int]:
    """Ids of a seed, the same in one run of the tests. No other seed's begin with the same one, as
    long as there are others: a shared server would have one token of the prompt cached."""
    rng = random.Random(f"kvedit {seed}")
    ids = [rng.randrange(low, high) for _ in range(num_tokens)]
    for step in range(high - low if ids else 0):
        first = low + (ids[0] - low + step) % (high - low)
        if _seed_of_first_id.setdefault(first, str(seed)) == str(seed):
            return [first, *ids[1:]]
    return ids


def fresh_name() -> str:
    return "skill-" + uuid.uuid4().hex[:12]


class ServerPool:
    """Servers by configuration, started on demand; the least recently used one makes room.

    order: configurations in the order the tests will ask for them. While the tests of one run,
    the next one starts beside them: a start takes longer than most tests, and uses one core.
    """

    def __init__(
        self,
        model_dir: Path,
        log_dir: Path,
        order: Sequence[ServerConfig] = (),
        max_alive: int = 3,
    ) -> None:
        self._model_dir = model_dir
        self._log_dir = log_dir
        self._order = list(order)
        self._max_alive = max_alive
        self._numbers = itertools.count()
        self._starter = ThreadPoolExecutor(max_workers=1)
        self._alive: dict[ServerConfig, Future[tuple[ServerProcess, Server]]] = {}

    def get(self, config: ServerConfig) -> Server:
        self._begin(config)
        _, server = self._alive[config].result()
        following = self._following(config)
        if following is not None:
            self._begin(following)
            self._touch(config)
        return server

    def close(self) -> None:
        for config in list(self._alive):
            self._stop(config)
        self._starter.shutdown()

    def _following(self, config: ServerConfig) -> ServerConfig | None:
        if config not in self._order:
            return None
        rest = self._order[self._order.index(config) + 1 :]
        return rest[0] if rest else None

    def _begin(self, config: ServerConfig) -> None:
        if config not in self._alive:
            while len(self._alive) >= self._max_alive:
                self._stop(next(iter(self._alive)))
            self._alive[config] = self._starter.submit(self._start, config)
        self._touch(config)

    def _touch(self, config: ServerConfig) -> None:
        self._alive[config] = self._alive.pop(config)  # most recently used last

    def _start(self, config: ServerConfig) -> tuple[ServerProcess, Server]:
        log_path = self._log_dir / f"server-{next(self._numbers)}.log"
        process = ServerProcess(
            config.argv(self._model_dir),
            env=TESTING_ENV | dict(config.env),
            log_path=log_path,
            stop_timeout_s=0.5,  # the host spends seconds on a crash report
            progress=None,
        )
        url = process.__enter__()
        server = Server(url, config.page_size, log_path, config.api_key, config.admin_key)
        return process, server

    def _stop(self, config: ServerConfig) -> None:
        process, _ = self._alive.pop(config).result()
        process.__exit__(None, None, None)
