"""The training job: trains a model bundle from captions and a frozen vision tower.

The module `run` defines the public function `train` and its result. It calls `job`,
which prepares the run folder, trains, and writes the bundle. `features` finds or builds
the indexes of features.

Files in the run folder:

    build/journal.json  the settings and the digests of input files that determine
                        the trained weights
    start/              bundle with the initial weights
    features-model/     bundle that computes the features
    images-model/       bundle that computes the embeddings, for online features
    features.edje/      index of the features
    images.edje/        index of the embeddings, for online features
    inputs.arrow        table of the images, for online features
    unreadable-*.jsonl  images that the training steps could not read, one
                        file per worker
    views.edje/         index of the features of augmented views
    miner.edje/         index of the mining model's embeddings
    data/, dev/         token ids and embeddings of the training captions and of
                        the dev captions
    .data.part/         finished shards of `data/`, until `data/` is complete
    checkpoints/        weights and optimiser states at some steps
    log.jsonl           one record per logged step
    result.json         result of the finished run
"""
