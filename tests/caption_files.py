"""Reading of caption files in tests."""

import warnings

from edje_index.captions.reading import read_captions


def read_counted(path, split=None):
    """Return the captioned images, and the number of captions that a warning says are
    left out.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        items = read_captions(path, split=split)
    counts = [str(each.message).rpartition(": ")[2] for each in caught]
    return items, sum(int(count.replace(",", "")) for count in counts)
