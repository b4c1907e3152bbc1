"""Training of the adapter and the joint encoder over cached features of the frozen tower.

What is trained and how (`config`, `losses`, `negatives`, `masking`, `schedule`), on which data (`dataset`, `batches`,
`prefetch`), the loop with its checkpoints (`loop`, `checkpoint`, `distributed`), and what surrounds it (`start`,
`selection`). Importing the package loads nothing heavy.
"""
