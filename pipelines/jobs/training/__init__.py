"""The training job: trains a model bundle from captions and a frozen vision tower.

`request` defines the request. `run` calls these stages. Each stage is a function in its own module:

1. `read_inputs` reads the captions and the given indexes.
2. `start` makes the initial model.
3. `indexes` builds the indexes of features that the request does not give.
4. `matching` finds the rows of the captioned images.
5. `data` prepares the token ids and embeddings of the captions. `caption_shards` does so in shards, on an engine.
6. `preparation` runs stages 2 to 5 and returns a `task`.
7. `steps` runs the optimiser steps, and `pipelines.jobs.train_finish` writes the bundle. Both read only this task.

Files in the run folder:

    run.json          all settings and digests of input files that determine the trained weights
    start/            bundle with the initial weights
    features-model/   bundle that computes the features
    features.edje/    index of the features
    images.edje/      index of the embeddings, for online features
    inputs.arrow      table of the images, for online features
    unreadable-*.jsonl  images that the training steps could not read, one file per worker
    views.edje/       index of the features of augmented views
    miner.edje/       index of the mining model's embeddings
    data/             token ids and embeddings of the captions
    .data.part/       finished shards of `data/`, until `data/` is complete
    checkpoints/      checkpoints
    log.jsonl         one record per logged step
    tensorboard/      the same log for TensorBoard
    result.json       result of the finished run
"""
