"""Build plans: what a build will do, frozen before it starts."""
