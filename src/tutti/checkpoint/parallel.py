"""`in_parallel`: one call in a thread each, also while the interpreter waits for its last threads.

A `ThreadPoolExecutor` refuses work once the main thread has come to the end of the script. A checkpoint that is still
being written then would be lost.
"""

from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


def in_parallel(function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]) -> list[Result]:
    """Return the results of `function` for several arguments. All calls end before an error of one is raised."""
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def call(number: int) -> None:
        try:
            results[number] = function(*arguments[number])
        except BaseException as error:  # Of any kind: it is raised below.
            errors[number] = error

    threads = [Thread(target=call, args=(number,), name="tutti-checkpoint-file") for number in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # Ended by the call, which reads or writes a file.
    for _, error in sorted(errors.items()):
        raise error
    return [results[number] for number in range(len(arguments))]
