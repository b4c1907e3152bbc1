"""How fast blocks come off a disk: the reader, its peers and the device itself, side by side.

`bench` is the whole; `plan` says what is run, `runner` runs it, each run in a process of its own (`worker`);
`summary` and `bars` judge it, `report` and `plots` show it.
"""
