"""The DeltaLog service: linear-attention models behind an OpenAI HTTP API, as a Ray Serve application."""

import os

# Ray and vLLM read these when they start, in this process and in every process that imports the service.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
