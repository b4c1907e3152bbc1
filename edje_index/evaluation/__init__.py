"""Recall of an index on captioned images: embedding alone beside re-ranked, over pool sizes and precisions.

``protocol`` decides what is asked and what is a right answer, ``pools`` ranks by embedding, ``tokens`` and ``scoring``
score pairs with the joint encoder, ``recall`` and ``bootstrap`` are the arithmetic, ``evaluate`` puts them together,
``report`` and ``figures`` show the result.
"""
