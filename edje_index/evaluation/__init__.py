"""Measures the recall of an index on captioned images.

Recall is measured for the embeddings alone, and after re-ranking for each pool size and precision.

`protocol` defines queries and candidates. `pools` ranks candidates by embedding. `pool_scores` and `pair_scores`
compute the final scores. `recall`, `recall_results` and `bootstrap` turn scores into recall with confidence intervals.
`evaluate` connects these modules. `report`, `figures` and `plots` show the results.
"""
