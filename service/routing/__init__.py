"""Where a request goes: pure decisions over views of the replicas. Knows neither Ray nor an engine."""
