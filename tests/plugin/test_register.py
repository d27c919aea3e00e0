import subprocess
import sys


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after ``statement``."""
    script = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_kernels_load_neither_vllm_nor_ray():
    assert {"vllm", "ray", "fastapi", "pydantic"}.isdisjoint(loaded_by("import deltalog_kernels"))


def test_the_plugin_package_loads_vllm_only_when_registered():
    config = "from deltalog_kernels.vllm_plugin import register; import deltalog_kernels.vllm_plugin.config"
    assert "vllm" not in loaded_by(config)


def test_register_is_safe_to_call_again_and_imports_no_model():
    statement = (
        "import os; os.environ['VLLM_LOGGING_LEVEL'] = 'ERROR'; "
        "from deltalog_kernels.vllm_plugin import register; register(); register(); "
        "from vllm.model_executor.models import ModelRegistry; "
        "from vllm.model_executor.custom_op import op_registry_oot; "
        "assert 'deltalog' in str(ModelRegistry.models['Qwen3NextForCausalLM']); "
        "assert not op_registry_oot"
    )
    assert "vllm" in loaded_by(statement)


def test_vllm_finds_the_entry_point():
    from importlib.metadata import entry_points

    [plugin] = entry_points(group="vllm.general_plugins", name="deltalog")
    assert plugin.value == "deltalog_kernels.vllm_plugin:register"
