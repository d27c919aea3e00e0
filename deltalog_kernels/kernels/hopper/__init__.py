"""The steps for GPUs with bulk copies between memory and a multiprocessor (compute capability 9.0), in Gluon.

The same arithmetic as the kernels beside this package, which run on any GPU and under Triton's interpreter.
Here the layouts are explicit and the base moves as whole tiles, without a register on the way.
"""
