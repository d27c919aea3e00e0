"""The steps as Triton kernels. decode.py validates, launch.py picks a configuration and launches."""
