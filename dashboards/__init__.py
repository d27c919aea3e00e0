"""Dashboards, alert rules and the metrics' documentation, generated from the catalogue."""
