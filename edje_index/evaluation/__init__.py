"""Recall of an index on captioned images: by embedding alone and re-ranked, over pool sizes and precisions.

`protocol` defines queries, candidates and right answers. `pools` ranks by embedding. `pool_scores` and `pair_scores`
compute the final scores. `recall`, `recall_results` and `bootstrap` turn scores into recall with confidence intervals.
`evaluate` connects them; `report`, `figures` and `plots` show the result.
"""
