"""GGUF files of llama.cpp: metadata and tensors of one file.

:mod:`convert.gguf.file` reads the file, :mod:`convert.gguf.formats` its numbers, and
:mod:`convert.gguf.tokenizer` its tokenizer. :mod:`convert.checkpoint.gguf` translates names and
settings into those of a checkpoint. After that, a target in a GGUF file is read like one in a
checkpoint.
"""
