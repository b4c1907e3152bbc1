"""The option `--score` of the commands that compute the final score."""

from __future__ import annotations

import click

from edje_index.scoring.weights import BUNDLE_SCORE, LOGIT, PART_NAMES, check_score


def _check(_: click.Context, __: click.Parameter, score: str) -> str:
    check_score(score)
    return score


_PARTS = ", ".join(
    f"{part} ({name})" if part != LOGIT else "logit (joint encoder)" for part, name in PART_NAMES.items()
)

score_option = click.option(
    "--score",
    default=BUNDLE_SCORE,
    show_default=True,
    metavar="SCORE",
    callback=_check,
    help="Score to re-rank by: 'bundle' for the weights of the model bundle, or PART=WEIGHT,... for a weighted sum of "
    f"parts, where PART alone means weight 1. Parts: {_PARTS}.",
)
