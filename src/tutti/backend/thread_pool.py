"""Threads that do what they are given."""

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch


class ThreadPool:
    """As many threads as have something to do at once, each made when it is needed: none waits for another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_free = 0
        self._num_torch_threads: int | None = None
        self._closed = False

    def compute_as_here(self) -> None:
        """Let them use as many threads of torch as the caller, when it is called first: each thread has its number."""
        self._num_torch_threads = self._num_torch_threads or torch.get_num_threads()

    def do(self, call: Callable[[], object]) -> bool:
        """Have `call` called by one of them; whether there is one: they may have been sent away, or be too many."""
        with self._lock:
            if self._closed or (self._num_free == 0 and not self._add_one()):
                return False
            self._num_free -= 1
            self._calls.put(call)
            return True

    def close(self) -> None:
        """Send them away, when they have done what they were given. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _add_one(self) -> bool:
        made = threading.Thread(target=self._work, name=f"{self._name} {len(self._threads)}", daemon=True)
        try:
            made.start()
        except RuntimeError:
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
            except BaseException:  # Told as Python tells of threads that fail; this one goes on.
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            del call  # It may hold tensors, and nothing may come for long.
            with self._lock:
                self._num_free += 1
