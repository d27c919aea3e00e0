"""The engine side of the service: what a replica runs. Nothing outside this package imports vLLM."""
