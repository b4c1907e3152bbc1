"""The training job: trains a model bundle on the captioned images of an index.

The module `run` defines the public function `train` and its result. It calls `job`,
which prepares the run folder, trains, and writes the bundle.

Files in the run folder:

    start/          bundle with the initial weights. Its file `run.json` records
                    everything that determines the trained weights
    train.npy       token ids and embeddings of the training captions
    dev.npy         the same of the dev captions
    train.parts/    finished shards of `train.npy`, until it is complete
    checkpoint.pt   weights and optimiser state of the last saved step
    log.jsonl       one record per logged step

The trained bundle has the result of the run in its file `training.json`.
"""
