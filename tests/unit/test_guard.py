"""The boundary of a hook: an error of ours is counted, handled, and goes no further."""

import pytest

from sglang_patches import guard


@pytest.fixture(autouse=True)
def _clean():
    yield
    guard.errors.clear()
    guard._faults.clear()


def test_an_armed_hook_fails_as_often_as_asked():
    guard.arm("some", times=2)
    for _ in range(2):
        with pytest.raises(guard.InjectedFault, match="injected fault in some"):
            guard.trip("some")
    guard.trip("some")


def test_arming_one_hook_leaves_the_others_alone():
    guard.arm("some")
    guard.trip("other")


def test_the_boundary_runs_the_fallback_counts_and_swallows(caplog):
    fallen_back = []
    with guard.boundary("some", lambda: fallen_back.append(1)):
        raise ValueError("broken")
    assert fallen_back == [1]
    assert guard.errors["some"] == 1
    assert "ValueError: broken" in caplog.text, "with its traceback"


def test_the_fallback_runs_only_after_an_error():
    with guard.boundary("some", lambda: pytest.fail("nothing was wrong")):
        pass
    assert not guard.errors


def test_the_end_of_the_process_is_not_swallowed():
    with pytest.raises(SystemExit), guard.boundary("some", lambda: None):
        raise SystemExit(0)
    with pytest.raises(KeyboardInterrupt), guard.boundary("some", lambda: None):
        raise KeyboardInterrupt


def test_an_error_in_the_fallback_is_not_hidden():
    def broken():
        raise LookupError("fallback")

    with pytest.raises(LookupError), guard.boundary("some", broken):
        raise ValueError
