"""What programs may rely on with backend "tutti": order, waits, futures, errors that say what to do."""

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from torch_groups import GROUPS, on_ranks
from tutti.backend import GroupConnection, group_over
from tutti.backend.operation_queue import RealTimeQueue
from tutti.backend.work import BackendWork
from tutti.errors import ConfigError, DeadlineExceeded, RankLost, ReplicaMismatch, TuttiError
from tutti.transports import SingleRankTransport
from tutti.transports.base import CompletedWork, Operation

LARGE = 3_000_000

everywhere = pytest.mark.parametrize("kind", ["memory", "sockets"])


def _all_well(results: list[Any]) -> list[Any]:
    for rank, result in enumerate(results):
        if isinstance(result, Exception):
            raise AssertionError(f"rank {rank} raised {result!r}") from result
    return results


def _reduce(op: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    return options


def _here() -> Any:
    """Of a call that waits."""
    options: Any = c10d.AllreduceOptions()
    options.asyncOp = False
    return options


@everywhere
def test_a_message_arrives_while_its_sender_waits_for_something_else(kind: str) -> None:
    """What Gloo lets programs do: a send that nobody has asked for yet, and a sum that the other comes to later."""

    def work(group: Any) -> float:
        large, small = torch.full((LARGE,), 1.0 + group.rank()), torch.ones(1)
        if group.rank() == 0:
            sending = group.send([large], 1)
            summing = group.allreduce([small])
            group.recv([large.new_empty(LARGE)], 1).wait()
            summing.wait()
            sending.wait()
        else:
            group.recv([torch.empty(LARGE)], 0).wait()
            group.send([large], 0).wait()
            group.allreduce([small]).wait()
        return float(small)

    assert _all_well(on_ranks(GROUPS[kind], 2, work)) == [2.0, 2.0]


@everywhere
def test_collectives_happen_in_the_order_asked(kind: str) -> None:
    def work(group: Any) -> list[float]:
        tensors = [torch.full((100,), float(number + group.rank())) for number in range(40)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        for each in reversed(works):
            each.wait()
        return [float(tensor[0]) for tensor in tensors]

    wanted = [float(3 * number + 3) for number in range(40)]
    assert _all_well(on_ranks(GROUPS[kind], 3, work)) == [wanted] * 3


@everywhere
def test_futures(kind: str) -> None:
    def work(group: Any) -> tuple[float, bool]:
        tensor = torch.ones(5)
        summing = group.allreduce([tensor])
        doubled = summing.get_future().then(lambda future: 2 * future.value()[0])
        return float(doubled.wait()[0]), summing.is_completed() and summing.is_success()

    assert _all_well(on_ranks(GROUPS[kind], 2, work)) == [(4.0, True)] * 2


@everywhere
def test_what_is_called_at_the_end_of_a_collective_may_wait_for_another(kind: str) -> None:
    def work(group: Any) -> list[float]:
        tensors = [torch.full((2,), float(number)) for number in range(4)]

        def more(_: Any) -> float:
            group.allreduce([tensors[2]], _here()).wait()
            nested = group.allreduce([tensors[3]]).get_future().then(lambda future: future.value()[0][0])
            return float(nested.wait())

        if group.rank() == 1:
            group.recv([torch.empty(1)], 0).wait()  # So that on rank 0 nobody but the group's own thread calls.
        first, _ = [group.allreduce([tensor]) for tensor in tensors[:2]]
        called = first.get_future().then(more)
        if group.rank() == 0:
            group.send([torch.ones(1)], 1).wait()
        called.wait()
        return [float(tensor[0]) for tensor in tensors]

    assert _all_well(on_ranks(GROUPS[kind], 2, work)) == [[0.0, 2.0, 4.0, 6.0]] * 2


@everywhere
def test_what_is_called_when_a_message_is_there_may_wait_for_another(kind: str) -> None:
    def work(group: Any) -> float:
        first, second = torch.ones(1), torch.full((1,), 5.0)
        if group.rank() == 1:
            group.recv([torch.empty(1)], 0).wait()
            group.send([first], 0).wait()
            group.allreduce([first]).wait()
            group.send([second], 0).wait()
            return float(first)

        def more(_: Any) -> float:
            group.allreduce([first], _here()).wait()
            second.zero_()
            group.recv([second], 1).wait()
            return float(second)

        called = group.recv([first], 1).get_future().then(more)
        group.send([torch.ones(1)], 1).wait()
        return float(called.wait())

    assert _all_well(on_ranks(GROUPS[kind], 2, work)) == [5.0, 2.0]


@everywhere
def test_messages_from_anyone_and_by_tag(kind: str) -> None:
    def work(group: Any) -> Any:
        tensor = torch.full((2,), float(group.rank()))
        if group.rank() > 0:
            group.send([tensor], 0, 7).wait()
            group.send([tensor + 10], 0, 8).wait()
            return None
        found = {}
        for _ in range(2):
            receiving = group.recv_anysource([tensor], 8)
            receiving.wait()
            found[receiving._source_rank()] = float(tensor[0])
        for rank in (1, 2):
            group.recv([tensor], rank, 7).wait()
            found[10 * rank] = float(tensor[0])
        return found

    assert _all_well(on_ranks(GROUPS[kind], 3, work))[0] == {1: 11.0, 2: 12.0, 10: 1.0, 20: 2.0}


@everywhere
def test_several_threads_wait_for_messages_whoever_of_them_moves_them(kind: str) -> None:
    def work(group: Any) -> list[Any]:
        if group.rank() == 1:
            for tag in (2, 1, 1, 2):
                group.send([torch.full((1,), float(tag))], 0, tag).wait()
                group.recv([torch.empty(1)], 0).wait()
            group.recv([torch.empty(1)], 0, 5).wait()
            return []
        found: dict[int, list[Any]] = {1: [], 2: []}

        def receive(tag: int) -> None:
            try:
                for _ in range(3):  # The third never comes.
                    tensor = torch.empty(1)
                    group.recv([tensor], 1, tag).wait()
                    group.send([tensor], 1).wait()
                    found[tag].append(float(tensor))
            except TuttiError as error:
                found[tag].append(type(error))

        threads = [threading.Thread(target=receive, args=(tag,)) for tag in found]
        for thread in threads:
            thread.start()
        while [len(each) for each in found.values()] != [2, 2]:
            threads[0].join(0.001)
        group.send([torch.ones(1)], 1, 5).wait()
        group.shutdown()
        for thread in threads:
            thread.join(20)
        return [*found[1], *found[2]]

    first = _all_well(on_ranks(GROUPS[kind], 2, work))[0]
    assert [first[:2], first[3:5]] == [[1.0, 1.0], [2.0, 2.0]]
    assert {first[2], first[5]} <= {RankLost, ConfigError}


@everywhere
def test_autograd_does_not_notice_what_is_received(kind: str) -> None:
    """As with Gloo: FSDP and pipelining receive into tensors that were saved for backward."""

    def work(group: Any) -> tuple[int, list[float]]:
        leaf = torch.nn.Parameter(torch.ones(3, 2))
        turned = leaf.detach().t()
        group.allreduce([leaf]).wait()
        group.broadcast([turned]).wait()
        return leaf._version, leaf.flatten().tolist()

    assert _all_well(on_ranks(GROUPS[kind], 2, work)) == [(0, [2.0] * 6)] * 2


@everywhere
def test_a_wait_may_have_a_deadline_and_be_tried_again(kind: str) -> None:
    def work(group: Any) -> str:
        tensor = torch.ones(1)
        said = ""
        if group.rank() == 0:
            summing = group.allreduce([tensor])
            try:
                summing.wait(timedelta(milliseconds=50))
            except DeadlineExceeded as error:
                said = str(error)
            group.send([tensor], 1).wait()
            summing.wait()
        else:
            group.recv([tensor], 0).wait()
            group.allreduce([tensor]).wait()
        return said

    said = _all_well(on_ranks(GROUPS[kind], 2, work))[0]
    assert said.startswith("rank 0: waited 0.05 s for an operation")


@everywhere
def test_a_group_gives_up_after_its_own_timeout(kind: str) -> None:
    def work(group: Any) -> None:
        if group.rank() == 0:
            with pytest.raises(RuntimeError) as raised:
                group.allreduce([torch.ones(1)]).wait()
            assert isinstance(raised.value, DeadlineExceeded)
            with pytest.raises(DeadlineExceeded):  # It would be out of step.
                group.barrier().wait()
            group.send([torch.ones(1)], 1).wait()
        else:
            group.recv([torch.ones(1)], 0).wait(timedelta(seconds=15))

    _all_well(on_ranks(GROUPS[kind], 2, work, timeout=timedelta(seconds=1)))


@everywhere
def test_a_message_that_nobody_sends_is_given_up_too(kind: str) -> None:
    def work(group: Any) -> None:
        if group.rank() == 0:
            receiving = group.recv([torch.ones(1)], 1)
            with pytest.raises(DeadlineExceeded, match=r"rank 0: waited 1 s"):
                receiving.wait()
            with pytest.raises(RuntimeError, match=r"DeadlineExceeded: rank 0: waited 1 s"):  # A future, as Gloo's.
                receiving.get_future().wait()
            group.send([torch.ones(1)], 1).wait()
            receiving.wait(timedelta(seconds=15))  # It was asked for all the time.
        else:
            group.recv([torch.ones(1)], 0).wait(timedelta(seconds=15))
            group.send([torch.ones(1)], 0).wait()

    _all_well(on_ranks(GROUPS[kind], 2, work, timeout=timedelta(seconds=1)))


@everywhere
def test_whoever_waits_for_a_rank_that_left_is_told(kind: str) -> None:
    def work(group: Any) -> tuple[str, str]:
        group.barrier().wait()
        if group.rank() == 1:
            return "", ""
        said = []
        for each in (group.allreduce([torch.ones(1)]), group.recv([torch.ones(1)], 1)):
            with pytest.raises(RankLost) as raised:
                each.wait()
            said.append(str(raised.value))
        return said[0], said[1]

    first, second = _all_well(on_ranks(GROUPS[kind], 2, work))[0]
    assert "rank 1 is gone" in first
    assert "rank 1 is gone" in second


@everywhere
def test_nothing_works_after_the_end(kind: str) -> None:
    def work(group: Any) -> None:
        group.barrier().wait()
        group.shutdown()
        for call in (group.barrier, lambda: group.send([torch.ones(1)], 1 - group.rank())):
            with pytest.raises(ConfigError, match=r"destroyed|closed"):
                call().wait()

    _all_well(on_ranks(GROUPS[kind], 2, work))


def test_different_operations_are_found_out() -> None:
    def work(group: Any) -> None:
        tensor = torch.ones(2 + group.rank())
        with pytest.raises(ReplicaMismatch, match=r"rank 0: all-reduce of 2 × .*; rank 1: all-reduce of 3"):
            group.allreduce([tensor]).wait()

    _all_well(on_ranks(GROUPS["memory"], 2, work))


def _bad(call: Callable[[Any], Any], says: str) -> Any:
    return pytest.param(call, says, id=says.split(".", maxsplit=1)[0][:40])


TENSOR = torch.ones(4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        _bad(
            lambda group: group.allreduce([TENSOR], _reduce(dist._make_nccl_premul_sum(2.0))),  # type: ignore[attr-defined]
            "backend 'tutti' has no ReduceOp.PREMUL_SUM; neither has Gloo",
        ),
        _bad(
            lambda group: group.allreduce([TENSOR.short()]),
            "ReduceOp.SUM does not take torch.int16 tensors in backend 'tutti'; Gloo refuses them too",
        ),
        _bad(
            lambda group: group.allreduce([TENSOR.bool()], _reduce(dist.ReduceOp.AVG)),
            "ReduceOp.AVG does not take torch.bool tensors",
        ),
        _bad(
            lambda group: group.allreduce([TENSOR], _reduce(dist.ReduceOp.BAND)),
            "ReduceOp.BAND does not take torch.float32 tensors",
        ),
        _bad(lambda group: group.allreduce([TENSOR, TENSOR]), "one tensor a rank, or one list, as Gloo does; got 2"),
        _bad(lambda group: group.allreduce([TENSOR.to_sparse()]), "takes dense tensors, got one of layout"),
        _bad(lambda group: group.allgather([[TENSOR]], [TENSOR]), "a tensor for each of 2 ranks, got 1"),
        _bad(
            lambda group: group.allgather([[TENSOR, TENSOR[:2]]], [TENSOR]),
            "one length and dtype, 4 × torch.float32; that for rank 1 is 2 × torch.float32",
        ),
        _bad(lambda group: group._allgather_base(TENSOR, TENSOR), "the large tensor to be 2 times the small one"),
        _bad(
            lambda group: group._reduce_scatter_base(TENSOR[:2], TENSOR.double(), None),
            "got 4 × torch.float64 and 2 × torch.float32",
        ),
        _bad(lambda group: group.alltoall_base(TENSOR, TENSOR, [], [4]), "2 numbers that add up to 4, got [4]"),
        _bad(lambda group: group.alltoall_base(TENSOR, TENSOR[:3], [], []), "cannot split 3 rows of its input"),
        _bad(lambda group: group.send([TENSOR], 5).wait(), "no peer 5 in a world of 2"),
    ],
)
def test_what_cannot_be_is_refused_with_words(call: Callable[[Any], Any], says: str) -> None:
    def work(group: Any) -> str:
        with pytest.raises(ConfigError) as raised:
            call(group)
        group.barrier().wait()  # It goes on all the same.
        return str(raised.value)

    for rank, said in enumerate(_all_well(on_ranks(GROUPS["memory"], 2, work))):
        assert says in said
        assert said.startswith(f"rank {rank}: ")


def _queued(queue: RealTimeQueue, operation: Any, blocking: bool = False) -> BackendWork:
    work = BackendWork(3, [])
    queue.submit_collective(work, operation, blocking)
    return work


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_a_collective_dies_of_all_that_follow_fail() -> None:
    asked = threading.Event()

    def dies() -> Operation:
        asked.wait(10)
        yield CompletedWork()
        sys.exit("no more")

    def lives() -> Operation:
        yield CompletedWork()

    queue = RealTimeQueue(SingleRankTransport(), 3)
    first, second = _queued(queue, dies()), _queued(queue, lives())
    asked.set()
    third = _queued(queue, lives(), blocking=True)
    for each in (first, second, third, _queued(queue, lives()), _queued(queue, lives(), blocking=True)):
        with pytest.raises(TuttiError, match=r"rank 3: a collective was cut short here by SystemExit\('no more'\)"):
            each.wait(timedelta(seconds=10))
    queue.close()


def test_a_collective_that_a_signal_ends_is_the_last() -> None:
    def interrupted() -> Operation:
        yield CompletedWork()
        raise KeyboardInterrupt

    queue = RealTimeQueue(SingleRankTransport(), 3)
    with pytest.raises(KeyboardInterrupt):
        _queued(queue, interrupted(), blocking=True)
    with pytest.raises(TuttiError, match=r"cut short here by KeyboardInterrupt"):
        _queued(queue, interrupted()).wait(timedelta(seconds=10))
    queue.close()


def test_without_a_thread_to_be_had_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def steps() -> Operation:
        taken.append(threading.current_thread())
        yield CompletedWork()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = RealTimeQueue(SingleRankTransport(), 3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        _queued(queue, steps()).wait(timedelta(seconds=10))
    _queued(queue, steps()).wait(timedelta(seconds=10))
    queue.close()
    assert taken[0] is threading.current_thread()
    assert taken[1] is not threading.current_thread()


def test_when_nobody_moves_messages_any_more_all_of_them_fail() -> None:
    def work(group: Any) -> None:
        def broken(*_: Any) -> None:
            raise MemoryError("no more")

        if group.rank() == 0:
            receiving = group.recv([torch.ones(1)], 1)
            future = group.recv([torch.ones(1)], 1).get_future()
            group._messages._messenger.idle = broken
            group._messages._messenger.wake()
            for wait in (receiving.wait, future.wait, lambda: group.recv([torch.ones(1)], 1).wait()):
                with pytest.raises((MemoryError, RuntimeError), match=r"no more"):
                    wait()
        group.barrier().wait()

    _all_well(on_ranks(GROUPS["memory"], 2, work))


@everywhere
def test_a_group_that_cannot_be_made_leaves_nothing_open(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def note(given: GroupConnection) -> Any:
        opened.append(given)
        return group_over(given)

    def broken(*_: Any) -> Any:
        raise OSError("no memory")

    def make(*args: Any) -> Any:
        with pytest.raises(OSError, match=r"no memory"):
            GROUPS[kind](*args)
        return SimpleNamespace(shutdown=lambda: None)

    monkeypatch.setattr("torch_groups.group_over", note)
    monkeypatch.setattr("tutti.backend.shared_memory_collectives.SharedMemoryCollectives", broken)
    monkeypatch.setattr("tutti.backend.MessageCollectives", broken)
    on_ranks(make, 2, lambda _: None)
    for each in opened:
        with pytest.raises(ConfigError, match=r"this transport is closed"):
            each.transport.channel("more")
    assert len(opened) == 2


def _from_rank(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "all-reduce": lambda group, data: group.allreduce([data]),
    "all-gather": lambda group, data: group.allgather([[torch.empty_like(data) for _ in range(4)]], [data]),
    "broadcast": lambda group, data: group.broadcast([data], _from_rank(3)),
    "barrier": lambda group, _: group.barrier(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_host_that_is_lost_wakes_the_others_on_every_rank(call: Callable[[Any, Tensor], Any]) -> None:
    """Of two hosts of two ranks each: who waits for the first of its host is told by it."""

    def work(group: Any) -> str:
        if group.rank() >= 2:
            return "left"
        with pytest.raises(RankLost) as lost:
            call(group, torch.ones(100_000)).wait()
        return str(lost.value)

    first, second, *_ = _all_well(on_ranks(GROUPS["hosts"], 4, work))
    assert "rank 0: rank" in first
    assert "rank 1: rank" in second


@pytest.mark.parametrize("call", [CALLS["all-reduce"], CALLS["all-gather"], CALLS["barrier"]])
def test_who_cannot_go_on_says_so_on_its_host_and_to_others(call: Callable[[Any, Tensor], Any]) -> None:
    """One rank of the first host has left; nobody else leaves before all have heard of it."""
    heard = threading.Barrier(3)

    def work(group: Any) -> None:
        if group.rank() == 1:
            return
        with pytest.raises(RankLost):
            call(group, torch.ones(100_000)).wait()
        heard.wait(15)

    _all_well(on_ranks(GROUPS["hosts"], 4, work))
