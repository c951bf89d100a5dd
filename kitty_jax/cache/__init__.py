"""The cache: configuration, state, attention, the page pool, the steps of a model."""
