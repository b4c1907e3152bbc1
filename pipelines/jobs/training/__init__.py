"""The training job: from captions and a frozen vision tower to a trained model bundle.

`request` says what to do and `run` does it. Each step is a function from values to a value: `captions` are read,
`features` computed, captions `matched` to rows of features, `data` prepared, and the task handed to the workers.

Files in the run folder:

    run.json          settings and fingerprints of everything that decides the training
    start/            bundle of the first step
    features-model/   bundle that computes the features; features.edje/ is the index of them
    views.edje/       index of the features of augmented views
    miner.edje/       index of the mining model's embeddings
    data/             captions as tokens and embeddings
    checkpoints/, log.jsonl, tensorboard/, result.json
"""
