"""Models in the checkpoint layouts of the field: ``config.json`` and safetensors.

One folder for the target (Qwen3.5 dense and MoE, with the ``mtp.*`` head inside, Qwen3, Llama) and
one for each block drafter (DFlash2, DSpark). :func:`save` writes them; :func:`jaxdraft.load` reads
them; onnxruntime-genai's model builder makes ONNX artifacts of them, which :func:`jaxdraft.load`
reads too, to the same numbers.

:mod:`~jaxdraft.checkpoint.layout` maps tensors to parameters, once for both
directions; :mod:`~jaxdraft.checkpoint.rotary` makes the rotary tables, which no checkpoint stores.
"""

from jaxdraft.checkpoint.write import Saved, save
from jaxdraft.rope import Rope

__all__ = ["Rope", "Saved", "save"]
