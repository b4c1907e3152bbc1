"""The training job: from captions and a frozen vision tower to a trained model bundle.

`request` says what to do and `run` does it. Each step is a function from values to a value, in a module of its own:
captions and given indexes are read (`read_inputs`), the initial model is made (`start`), `features` are computed,
captions are matched to rows of features (`matching`), tokens and embeddings are prepared (`data`), and the result is a
`task`. `steps` and `pipelines.jobs.train_finish` read the task alone, not the request.

Files in the run folder:

    run.json          settings and fingerprints of everything that decides the training
    start/            bundle of the first step
    features-model/   bundle that computes the features; features.edje/ is the index of them
    views.edje/       index of the features of augmented views
    miner.edje/       index of the mining model's embeddings
    data/             captions as tokens and embeddings
    checkpoints/, log.jsonl, tensorboard/, result.json
"""
