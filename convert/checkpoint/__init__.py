"""Checkpoint folders (``config.json`` and safetensors) -> Flax modules, without ONNX.

The writing half is :mod:`jaxdraft.checkpoint`.
"""
