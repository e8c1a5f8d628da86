"""Artifacts of onnxruntime-genai's model builder -> Flax modules."""
