"""DeltaLog for an unpatched vLLM, switched on by ``--additional-config '{"deltalog": {...}}'``.

vLLM calls ``register`` in each of its processes (entry point ``vllm.general_plugins``). Without the key
nothing changes: classes, shapes and outputs are vLLM's own.
"""


def register() -> None:
    """Register the models and the configuration check. Safe to call again."""
    # Imported here: whoever imports deltalog_kernels without vLLM must not need it.
    from deltalog_kernels.vllm_plugin import seams

    seams.install()
