"""Results of futures, in the order of the items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def ordered_results(
    items: Iterable[_Item], submit: Callable[[_Item], Future[_Result]], *, ahead: int
) -> Iterator[_Result]:
    """Yield the result of `submit(item)` for each of `items`, in their order.

    Args:
        items: the items. They are taken one by one, while the results are consumed.
        ahead: number of items that are submitted before the first result is yielded,
            and kept submitted from then on.
    """
    pending: deque[Future[_Result]] = deque()
    for item in items:
        pending.append(submit(item))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def ordered_map(
    work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int, ahead: int
) -> Generator[_Result, None, None]:
    """Yield `work(item)` of each item, in order. Threads work on at most `ahead`
    items ahead.
    """
    with ThreadPoolExecutor(threads, "edje-ahead") as pool:
        try:
            yield from ordered_results(
                items, lambda item: pool.submit(work, item), ahead=ahead
            )
        finally:
            pool.shutdown(cancel_futures=True)
