"""Planning: the request, the plan and the inputs of a build, fixed before it starts."""
