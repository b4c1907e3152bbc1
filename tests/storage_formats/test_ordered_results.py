"""Results of futures come in the order of the items, and only some items are submitted ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from storage_formats.ordered_results import ordered_results


def test_results_are_in_order_and_items_are_taken_as_needed():
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(30):
            taken.append(number)
            yield number

    def work(number: int) -> int:
        time.sleep(0.001 * (number * 7 % 5))
        return number

    results = []
    with ThreadPoolExecutor(4) as pool:
        for result in ordered_results(numbers(), lambda number: pool.submit(work, number), ahead=6):
            results.append(result)
            assert len(taken) <= len(results) + 5
    assert results == list(range(30))
