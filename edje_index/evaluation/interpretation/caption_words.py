"""Finds the content words of a caption, for the alignment score."""

from __future__ import annotations

import string
import unicodedata

# The English stop words of NLTK (Bird, Loper and Klein, "Natural Language Processing with Python"), which the EDJE
# paper calls standard, without apostrophes.
_STOP_WORDS = """
i me my myself we our ours ourselves you youre youve youll youd your yours yourself yourselves he him his himself she
shes her hers herself it its itself they them their theirs themselves what which who whom this that thatll these those
am is are was were be been being have has had having do does did doing a an the and but if or because as until while of
at by for with about against between into through during before after above below to from up down in out on off over
under again further then once here there when where why how all any both each few more most other some such no nor not
only own same so than too very s t can will just don dont should shouldve now d ll m o re ve y ain aren arent couldn
couldnt didn didnt doesn doesnt hadn hadnt hasn hasnt haven havent isn isnt ma mightn mightnt mustn mustnt needn neednt
shan shant shouldn shouldnt wasn wasnt weren werent won wont wouldn wouldnt
"""
ENGLISH_STOP_WORDS = frozenset(_STOP_WORDS.split())


def content_words(caption: str) -> str:
    """Return the words of a caption without stop words and punctuation, in lower case, separated by spaces.

    Example:
        >>> from edje_index.evaluation.interpretation.caption_words import content_words
        >>> content_words("A child playing in the ocean.")
        'child playing ocean'
    """
    kept = "".join(character for character in caption.lower() if not _is_punctuation(character))
    return " ".join(word for word in kept.split() if word not in ENGLISH_STOP_WORDS)


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")
