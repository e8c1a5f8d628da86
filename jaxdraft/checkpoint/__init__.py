"""Models in the checkpoint layouts of the field: ``config.json`` and safetensors.

One folder for the target (Qwen3.5 dense and MoE, with the ``mtp.*`` head inside, Qwen3, Llama) and
one for each block drafter (DFlash, DFlash2, DSpark). :func:`save` writes them;
:func:`jaxdraft.load` reads them; onnxruntime-genai's model builder makes ONNX artifacts of them,
which :func:`jaxdraft.load` reads too, to the same numbers.

:mod:`~jaxdraft.checkpoint.layout` maps tensors to parameters, once for both
directions; :mod:`~jaxdraft.checkpoint.rotary` makes the rotary tables, which no checkpoint stores.
"""

from typing import TYPE_CHECKING, Any

from jaxdraft.rope import Rope

if TYPE_CHECKING:
    from jaxdraft.checkpoint.write import Saved, save

__all__ = ["Rope", "Saved", "save"]


def __getattr__(name: str) -> Any:
    if name in ("Saved", "save"):  # readers of checkpoints need only the tables of this package
        from jaxdraft.checkpoint import write

        return getattr(write, name)
    raise AttributeError(f"module 'jaxdraft.checkpoint' has no attribute {name!r}")
