"""Grafana boards of the service as code: what they ask, how they look, and rules that they keep."""
