"""The DeltaLog service: linear-attention models behind an OpenAI HTTP API, as a Ray Serve application."""

import os

# Ray and vLLM read these when they start, in this process and in every process that imports the service.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    # The data path: HAProxy in front of the ingress, gRPC between ingress and replicas.
    RAY_SERVE_ENABLE_HA_PROXY="1",
    RAY_SERVE_USE_GRPC_BY_DEFAULT="1",
    # One thread a process: three that take turns at the interpreter slow a burst of requests down.
    RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD="0",
    RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP="0",
    RAY_AUTH_MODE="token",
    # On a CPU vLLM would give the model a process of its own, and wait for each step in a loop of yields.
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)
