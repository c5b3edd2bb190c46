"""The boundary of a hook: an error of ours is counted, handled, and goes no further."""

import threading

import pytest
import torch

from sglang_patches import guard


@pytest.fixture(autouse=True)
def _clean():
    yield
    guard.errors.clear()
    guard.join(None, lambda: None)


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


def test_a_body_that_ended_on_the_only_rank_is_well():
    with guard.boundary("some", lambda: pytest.fail("nothing was wrong")) as hook:
        guard.agree("point")
    assert hook.is_well and hook.error is None
    with guard.boundary("some", lambda: None) as hook:
        raise ValueError("broken")
    assert not hook.is_well and str(hook.error) == "broken"


class Told:
    """A fail point that a test told what fails: a stage, or one on one rank."""

    def __init__(self, monkeypatch, *failing):
        self.asked = []
        self.failing = failing
        monkeypatch.setattr(guard, "fail_point", self)

    def __call__(self, point):
        self.asked.append(point)
        if point in self.failing:
            raise ValueError(f"told to fail in {point}")


def test_a_boundary_that_is_told_to_fails_when_its_body_has_done_everything(monkeypatch):
    Told(monkeypatch, "some")
    done = []
    with guard.boundary("some", lambda: done.append("undone")) as hook:
        done.append("body")
    assert done == ["body", "undone"] and not hook.is_well
    assert str(hook.error) == "told to fail in some" and guard.errors == {"some": 1}


def test_an_agreement_that_is_told_to_fails_before_what_stands_behind_it(monkeypatch):
    Told(monkeypatch, "point")
    with guard.boundary("some", lambda: None) as hook:
        guard.agree("point")
        pytest.fail("the body went on")
    assert not hook.is_well and guard.errors == {"some": 1}


def test_what_is_contained_fails_at_its_end_and_says_so(monkeypatch):
    Told(monkeypatch, "some")
    with guard.contained("some") as outcome:
        done = True
    assert done and not outcome.is_well and guard.errors == {"some": 1}
    with guard.contained("other") as outcome:
        pass
    assert outcome.is_well


def test_a_body_that_failed_by_itself_is_not_asked_again(monkeypatch):
    told = Told(monkeypatch)
    for context in (guard.boundary("some", lambda: None), guard.contained("other")):
        with context:
            raise ValueError
    assert told.asked == []


# ---- two ranks, each a thread


class Ranks:
    """An all_reduce between threads. A rank that votes alone breaks the barrier: a test that
    hangs on a server fails here."""

    def __init__(self, monkeypatch, num_ranks=2):
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks)
        self.votes = {}
        self.num_votes = [0] * num_ranks
        self.rank = threading.local()
        self.levelled = []
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)
        guard.join("ranks", lambda: self.levelled.append(self.rank.number))

    def all_reduce(self, tensor, operation, group):
        assert group == "ranks"
        self.num_votes[self.rank.number] += 1
        self.votes[self.rank.number] = int(tensor)
        self.barrier.wait(timeout=20)
        reduced = (min if operation == torch.distributed.ReduceOp.MIN else max)(self.votes.values())
        self.barrier.wait(timeout=20)
        tensor.fill_(reduced)

    def run(self, body):
        """Results of body(rank) by rank."""
        results = [None] * self.num_ranks

        def work(number):
            self.rank.number = number
            try:
                results[number] = body(number)
            except BaseException as error:
                self.barrier.abort()
                results[number] = error

        threads = [threading.Thread(target=work, args=(n,)) for n in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


STAGES = ("prepare", "first", "change", "second", "rest")


def staged(failing, log):
    """A body with two inner votes; on rank r it fails in the stage failing[r], if any."""

    def body(rank):
        with guard.boundary("some", lambda: log.append((rank, "undone"))) as hook:
            for stage in STAGES:
                if stage in ("first", "second"):
                    guard.agree(stage)
                elif failing.get(rank) == stage:
                    raise ValueError(stage)
                else:
                    log.append((rank, stage))
        return hook.is_well

    return body


@pytest.mark.parametrize("other", [None, "prepare", "change", "rest"])
@pytest.mark.parametrize("mine", ["prepare", "change", "rest"])
def test_a_hook_that_fails_on_one_rank_is_undone_on_all(monkeypatch, mine, other):
    """Wherever it fails, and also when the ranks fail in different places."""
    ranks, log = Ranks(monkeypatch), []
    failing = {1: mine} if other is None else {0: other, 1: mine}
    assert ranks.run(staged(failing, log)) == [False, False]
    assert sorted(entry for entry in log if entry[1] == "undone") == [(0, "undone"), (1, "undone")]
    assert sorted(ranks.levelled) == [0, 1]
    assert ranks.num_votes[0] == ranks.num_votes[1]
    if "prepare" in failing.values():
        assert not [entry for entry in log if entry[1] == "change"], "nobody changed anything"


@pytest.mark.parametrize("point", ["first", "second", "some"])
def test_a_point_that_is_told_to_fail_on_one_rank_is_undone_on_all(monkeypatch, point):
    ranks, log = Ranks(monkeypatch), []

    def fails_on_rank_1(asked):
        if asked == point and ranks.rank.number == 1:
            raise ValueError(point)

    monkeypatch.setattr(guard, "fail_point", fails_on_rank_1)
    assert ranks.run(staged({}, log)) == [False, False]
    assert sorted(entry for entry in log if entry[1] == "undone") == [(0, "undone"), (1, "undone")]
    assert ranks.num_votes[0] == ranks.num_votes[1] and sorted(ranks.levelled) == [0, 1]
    is_changed = (1, "change") in log
    assert is_changed is (point != "first") and ((0, "change") in log) is is_changed


def test_a_hook_that_is_well_everywhere_ends_well_on_all(monkeypatch):
    ranks, log = Ranks(monkeypatch), []
    assert ranks.run(staged({}, log)) == [True, True]
    assert ranks.num_votes == [3, 3] and not ranks.levelled and not guard.errors


def test_ranks_stay_in_step_over_many_hooks(monkeypatch):
    """A vote too many in one hook would meet the next one."""
    ranks = Ranks(monkeypatch)
    failures = [{}, {1: "change"}, {0: "prepare"}, {}, {0: "rest", 1: "prepare"}, {1: "rest"}, {}]

    def body(rank):
        return [staged(failing, [])(rank) for failing in failures]

    first, second = ranks.run(body)
    assert first == second == [not failing for failing in failures]


def test_the_highest_number_of_any_rank(monkeypatch):
    assert Ranks(monkeypatch).run(lambda rank: guard.highest(5 + rank)) == [6, 6]


# ---- what decides nothing


def test_what_is_contained_is_counted_and_told_now_and_then(caplog):
    for _ in range(9):
        with guard.contained("some"):
            raise OSError("gone")
    assert guard.errors["some"] == 9
    assert len(caplog.records) == 4, "at its 1st, 2nd, 4th and 8th time"


def test_what_is_contained_takes_no_vote(monkeypatch):
    ranks = Ranks(monkeypatch)

    def body(rank):
        with guard.contained("some"):
            if rank == 0:
                raise OSError("gone")
        return True

    assert ranks.run(body) == [True, True] and ranks.num_votes == [0, 0]
