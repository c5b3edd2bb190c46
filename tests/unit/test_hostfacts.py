"""What the host resolved decides, not what the operator gave."""

from __future__ import annotations

import pytest

from sglang_patches.cpu import prepare

pytestmark = pytest.mark.own_process
prepare()

from sglang.srt.arg_groups.overrides import declare_resolution  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_patches.host.facts import has_overlap, model_name  # noqa: E402


def record(**given: object) -> ServerArgs:
    return ServerArgs(model_path="m", radix_cache_backend="kvedit", **given)


def test_overlap_is_what_the_host_made_of_the_flag() -> None:
    args = record()
    assert has_overlap(args) and not has_overlap(record(disable_overlap_schedule=True))
    declare_resolution(args, "test", disable_overlap_schedule=True)
    assert not args.disable_overlap_schedule, "the record keeps what was given"
    assert not has_overlap(args)


def test_the_models_name_is_the_one_it_is_served_under() -> None:
    assert model_name(record()) == "m"
    assert model_name(record(served_model_name="n")) == "n"
    args = record()
    declare_resolution(args, "test", served_model_name="resolved")
    assert model_name(args) == "resolved"
