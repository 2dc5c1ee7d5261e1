"""A thread pool that grows as needed, so that no call waits for another one to end.

How it works
------------
`_num_free` counts the threads without a call, minus the calls that are queued. `submit` takes one, or starts a new
thread if there is none; both under the lock. So every queued call has a thread that is waiting for it, and a call
that blocks for long, such as a callback that waits for another collective, delays no other. Threads are kept until
`close`.
"""

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch


class ThreadPool:
    """As many threads as there are calls at once, each created when it is needed."""

    def __init__(self, name: str) -> None:
        """Prepare a pool whose threads are called `name` and a number."""
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_free = 0
        self._num_torch_threads: int | None = None
        self._closed = False

    def copy_num_threads(self) -> None:
        """Let new threads use as many torch threads as the caller, on the first call: torch counts them per thread."""
        self._num_torch_threads = self._num_torch_threads or torch.get_num_threads()

    def submit(self, call: Callable[[], object]) -> bool:
        """Run `call` in a thread; return False if the pool is closed, or no thread can be started."""
        with self._lock:
            if self._closed or (self._num_free == 0 and not self._add_thread()):
                return False
            # Reserved here, under the lock: the thread that is free now takes this call or one queued before it.
            self._num_free -= 1
            self._calls.put(call)
            return True

    def close(self) -> None:
        """Run the calls that were submitted, and join the threads. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:  # Behind all calls: each thread takes one None and ends.
                    self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                # Ended by the thread, which takes its None after the calls before it; each of their waits ends.
                thread.join()

    def _add_thread(self) -> bool:
        """Start one more thread; return False if the system allows no more."""
        made = threading.Thread(target=self._work, name=f"{self._name} {len(self._threads)}", daemon=True)
        try:
            made.start()
        except RuntimeError:  # The system's limit.
            return False
        self._threads.append(made)
        self._num_free += 1
        return True

    def _work(self) -> None:
        if self._num_torch_threads is not None:
            torch.set_num_threads(self._num_torch_threads)
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException:  # Reported as Python reports threads that fail; this one continues.
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del call  # It may hold tensors, and the next call may come much later.
            with self._lock:
                self._num_free += 1
