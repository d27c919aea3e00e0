"""The HTTP edge of the service."""
