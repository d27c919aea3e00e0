"""Discrete-event simulation of pools, routers and autoscalers: the router's own policy objects, no engine."""
